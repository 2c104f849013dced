"""The version of this package, which setup.py and `--version` read; CHANGELOG.md says what each version brought."""

VERSION = "0.6.0"

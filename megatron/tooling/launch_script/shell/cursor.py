"""A position in the text of a script; reads blanks, comments, here-documents, quotes and words from there on."""

from __future__ import annotations

import re

from megatron.base.errors import ConfigError
from megatron.tooling.launch_script.shell.syntax import Word, WordPart
from megatron.tooling.launch_script.shell.unknown import CLOSE, OPEN

_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-?|<>|>>|>\||>&|<&|&>>|&>|<(?!\()|>(?!\())")
_CASE = re.compile(r"(?<![\w-])(?:(case)(?=\s+[^\n]*?\sin\s)|esac(?![\w-]))")
_CODED = re.compile(r"x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|([0-7]{1,3})")  # a character by its number
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}
METACHARACTERS = " \t\n;&|()<>"


class Cursor:
    """The text from position `at` on. Every reading method moves `at` past the text it has read. Raises ConfigError."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        # pending here-documents: delimiter, and whether leading tabs are stripped
        self._heredocs: list[tuple[str, bool]] = []

    def error(self, what: str, at: int | None = None) -> ConfigError:
        """Returns the error to raise, with the line number."""
        line = self.text.count("\n", 0, self.at if at is None else at) + 1
        return ConfigError(f"line {line} of the script: {what}; give the command itself if this is valid bash")

    def starts(self, *texts: str) -> bool:
        """Returns whether one of `texts` is next."""
        return self.text.startswith(texts, self.at)

    def take(self, text: str) -> bool:
        """Skips `text` if it is next, and returns whether it was."""
        is_next = self.starts(text)
        self.at += len(text) * is_next
        return is_next

    def blanks(self) -> None:
        """Skips blanks, continued lines and a comment."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r":
                self.at += 1
            elif self.starts("\\\n"):
                self.at += 2
            elif self.starts("\\\r\n"):
                self.at += 3
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def lines(self) -> None:
        """Skips blanks and line ends, and the here-documents that begin after these."""
        self.blanks()
        while self.take("\n"):
            for delimiter, tabs in self._heredocs:
                self._skip_heredoc(delimiter, tabs)
            self._heredocs.clear()
            self.blanks()

    def redirection(self) -> bool:
        """Skips a redirection with its target; returns whether there was one."""
        match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            return False
        self.at = match.end()
        self.blanks()
        start = self.at
        if self.word() is not None and match[1] in ("<<", "<<-"):
            self._heredocs.append((re.sub(r"[\\'\"]", "", self.text[start : self.at]), match[1] == "<<-"))
        return True

    def word(self, stops: str = METACHARACTERS) -> Word | None:
        """Returns the word that begins here, or None. It ends before an unquoted character of `stops`."""
        parts: list[WordPart] = []
        plain: list[str] = []

        def flush() -> None:
            if plain:
                parts.append(WordPart("text", "".join(plain), False))
                plain.clear()

        while self.at < len(self.text):
            char = self.text[self.at]
            if self.starts("\\\n", "\\\r\n"):
                self.at = self.text.index("\n", self.at) + 1
            elif char in "\\'\"$`" or char == OPEN or self.starts("<(", ">("):
                flush()
                parts += self._special()
            elif char in stops:
                break
            else:
                plain.append(char)
                self.at += 1
        flush()
        return Word(tuple(parts)) if parts else None

    def need_word(self) -> Word:
        """Returns the word that begins here or after blanks. Raises ConfigError if there is none."""
        self.blanks()
        word = self.word()
        if word is None:
            raise self.error("a word is missing")
        return word

    def starts_word(self, text: str) -> bool:
        """Returns whether `text` is next, as a whole word."""
        end = self.at + len(text)
        return self.starts(text) and self.text[end : end + 1] in ("", *METACHARACTERS)

    def _special(self) -> list[WordPart]:
        char, start = self.text[self.at], self.at
        if char == OPEN:  # text that was expanded before and is read again, by eval
            self.at = self._find(CLOSE) + 1
            return [WordPart("text", self.text[start : self.at], True)]
        if char == "\\":
            self.at += 2
            return [WordPart("text", self.text[start + 1 : self.at], True)]
        if char == "'":
            self.at += 1
            end = self._find("'")
            inside, self.at = self.text[self.at : end], end + 1
            return [WordPart("text", inside, True)]
        if self.take("$'"):
            return [WordPart("text", self._escaped(), True)]
        if self.take('"') or self.take('$"'):
            return self._double_quoted()
        if self.starts("<(", ">("):
            self.at += 2
            return [WordPart("command", self._until_parenthesis(), False)]
        return [self._expansion(quoted=False)]

    def _double_quoted(self) -> list[WordPart]:
        parts: list[WordPart] = []
        start = self.at
        while not self.take('"'):
            if self.at >= len(self.text):
                raise self.error('a " is not closed', start)
            char = self.text[self.at]
            if char == OPEN:
                parts += self._special()
            elif self.take("\\"):
                after = self.text[self.at : self.at + 1]
                self.at += 1
                parts.append(WordPart("text", {"\n": ""}.get(after, after if after in '$`"\\' else "\\" + after), True))
            elif char in "$`":
                parts.append(self._expansion(quoted=True))
            else:
                parts.append(WordPart("text", char, True))
                self.at += 1
        return parts or [WordPart("text", "", True)]

    def _expansion(self, quoted: bool) -> WordPart:
        """Returns the expansion that begins with a `$` or a backquote."""
        if self.take("`"):
            start = self.at
            while not self.starts("`"):
                if self.at >= len(self.text):
                    raise self.error("a ` is not closed", start)
                self.at += 2 if self.starts("\\") else 1
            self.at += 1
            escaped = r"\\([\\`$\"])" if quoted else r"\\([\\`$])"
            return WordPart("command", re.sub(escaped, r"\1", self.text[start : self.at - 1]), quoted)
        if self.take("$(("):
            return WordPart("arithmetic", self.arithmetic(), quoted)
        if self.take("$("):
            return WordPart("command", self._until_parenthesis(), quoted)
        if self.take("${"):
            return WordPart("parameter", self._until_brace(), quoted)
        name = _NAME.match(self.text, self.at + 1)
        if name is None:
            self.at += 1
            return WordPart("text", "$", quoted)
        self.at = name.end()
        return WordPart("parameter", name[0], quoted)

    def arithmetic(self) -> str:
        """Returns the text up to the closing `))`."""
        start, depth = self.at, 0
        while not (depth == 0 and self.starts("))")):
            if self.at >= len(self.text):
                raise self.error("a (( is not closed", start)
            if self.text[self.at] in "$`":
                self._special()  # a command in it may have parentheses of its own
                continue
            depth += {"(": 1, ")": -1}.get(self.text[self.at], 0)
            self.at += 1
        self.at += 2
        return self.text[start : self.at - 2]

    def _until_parenthesis(self) -> str:
        """Returns the text up to the closing `)`, skipping quotes and nested parentheses."""
        return self._until("(", ")", comments=True)

    def _until_brace(self) -> str:
        return self._until("{", "}", comments=False)

    def _until(self, opening: str, closing: str, comments: bool) -> str:
        start, depth = self.at, 1
        cases: list[int] = []  # depths of the `case`s that are open; a `)` at one of these ends a pattern
        while depth:
            if self.at >= len(self.text):
                raise self.error(f"a ${opening} is not closed", start)
            char = self.text[self.at]
            if char in "\\'\"`$":
                self._special()
            elif comments and self.starts("<<") and self.redirection():
                pass
            elif comments and char == "\n":
                self.lines()
            elif comments and char == "#" and self.text[self.at - 1] in " \t\n":
                self.blanks()
            elif comments and (case := _CASE.match(self.text, self.at)):
                if case[1]:
                    cases.append(depth)
                elif cases:
                    cases.pop()
                self.at += 4
            else:
                ends_pattern = char == ")" and cases[-1:] == [depth]
                depth += 0 if ends_pattern else {opening: 1, closing: -1}.get(char, 0)
                self.at += 1
        return self.text[start : self.at - 1]

    def _escaped(self) -> str:
        chars = []
        start = self.at
        while not self.take("'"):
            if self.at >= len(self.text):
                raise self.error("a $' is not closed", start)
            if self.take("\\"):
                coded = _CODED.match(self.text, self.at)
                if coded is not None:
                    chars.append(chr(int(coded[1] or coded[2], 16) if coded[1] or coded[2] else int(coded[3], 8)))
                    self.at = coded.end()
                    continue
                char = self.text[self.at : self.at + 1]
                chars.append(_ESCAPES.get(char, char if char in "\\'\"?" else "\\" + char))
            else:
                chars.append(self.text[self.at])
            self.at += 1
        return "".join(chars)

    def _find(self, text: str) -> int:
        end = self.text.find(text, self.at)
        if end < 0:
            raise self.error(f"a {text} is not closed")
        return end

    def _skip_heredoc(self, delimiter: str, tabs: bool) -> None:
        while self.at < len(self.text):
            end = self.text.find("\n", self.at)
            end = len(self.text) if end < 0 else end
            line = self.text[self.at : end].rstrip("\r")
            self.at = min(end + 1, len(self.text))
            if (line.lstrip("\t") if tabs else line) == delimiter:
                return

# Runs the torchrun command in `command`, unless it has a mistake, which torchrun would start again and again. `root` is the
# repository.
code=0
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" python "$root/tools/check_run.py" -- "${command[@]}" || code=$?
[ $code != 2 ] || exit 2
exec "${command[@]}"

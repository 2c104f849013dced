"""What is read from a script is what bash itself does with it: the same commands with the same words."""

import shutil
import subprocess

import pytest

from megatron.command_line.shell.interpret import invocations

# Every `show` prints its arguments, one on a line between brackets; bash runs these scripts, we only read them.
PRELUDE = 'show() { printf "[%s]" "$@"; echo; }\n'
SCRIPTS = {
    "quotes": r"""
show a 'b  c' "d $(echo e) \"f\" \\ \$g \h" $'i\tj' k\ l "" m''n
""",
    "continued lines": r"""
show a \
   b\
c # a comment
show '#' d#e
""",
    "comments in arrays": r"""
A=(
  --x 1 # not this
  # nor this
  --y
)
show ${A[@]}
""",
    "splitting": r"""
A="  a  b "; show $A "$A" x$A.y "x${A}y" ${A}z
""",
    "arrays": r"""
A=(a "b c"); A+=(d); A[5]=f
show "${A[@]}" ${A[@]} "${A[*]}" "$A" "${A[1]}" ${#A[@]} "${A[-1]}" x"${A[@]}"y
""",
    "strings that grow": r"""
A=a; A+=" b"; A+=$(echo c); show $A "${A}"
""",
    "arrays that become strings": r"""
A=(a b); B="${A[@]} c"; A="${A[@]} d"; show $B "$B" "$A"
""",
    "named elements": r"""
declare -A S=([big]=70 [small]=7); S[mid]=13
show ${S[big]} ${S[small]} ${S[mid]} "${S[none]}"
""",
    "quoted array": r"""
A=("--split '9,1'" "--x y"); show ${A[@]}
""",
    "empty": r"""
A=; B=""; C=(); show $A "$A" ${B} "${C[@]}" ${C[@]}
""",
    "defaults": r"""
B=b; E=
show ${A:-a} ${B:-x} ${E:-e} "${E-e}" "${B:+set}" "${A:+set}" ${D:=d} $D ${A:-"x y"} "${A:-x y}"
""",
    "nested defaults": r"""
C=3; show ${A:-${B:-$C}} ${A:-$((C + 1))} ${A:-$(echo z)}
""",
    "arguments": r"""
f() { show $# "$1" ${2:-two} "$@"; shift; show "$1" $*; }
f a "b c" d
""",
    "arithmetic": r"""
A=7; B=3; show $((A * B)) $(( ($A + $B) / 4 )) $((A % B)) $((-A / B)) $((2 ** 5)) $((A > B ? 1 : 0)) $((A << 2))
""",
    "more arithmetic": r"""
A=7
show $(( A == 7 && 1 || 0 )) $((!A)) $((~A)) $((A & 3 | 8 ^ 1)) $(( 1 + 2 * 3 - 4 )) $((A != 7))
""",
    "expr": r"""
A=16; show $(expr $A / 4) `expr $A - 1`
""",
    "cuts": r"""
P=/a/b.tar.gz
show ${P##*/} ${P#*/} ${P%.*} ${P%%.*} ${P/b/c} ${P//a/x} ${P:1:3} ${P: -2} ${#P}
""",
    "case of letters": r"""
A=Ab; show ${A^^} ${A,,} ${A^} ${A,}
""",
    "indirect": r"""
A=B; B=b; show ${!A}
""",
    "if": r"""
A=2
if [ "$A" = 1 ]; then show one; elif [[ $A == 2 ]]; then show two; else show other; fi
""",
    "unset is empty": r"""
if [ -z "$A" ]; then A=a; fi; if [ -n "$B" ]; then show b; else show $A; fi; [ "$C" = true ] || show c
""",
    "numbers": r"""
A=8; if [ $A -gt 4 ] && [ $A -le 8 ]; then show yes; fi; if (( A % 3 )); then show rest; fi; [[ $A -ne 8 ]] || show same
""",
    "tests": r"""
A=llama3; [[ $A == llama* && $A != *2 ]] && show l
[ ! "$A" = b ] && show n; [[ -z $B || -n $C ]] && show e; ! false && show f
""",
    "and or": r"""
A=a; [ "$A" = a -o "$A" = b ] && show o; [ "$A" = a -a "$A" = b ] || show n; true && false || show t
""",
    "case": r"""
for A in 7B 13b x; do case $A in 7B|8B) show small ;; 13?) show mid ;; *) show other ;; esac; done
""",
    "for": r"""
for I in 1 2 "3 4"; do show $I; done; for A in a b; do [ $A = a ] && continue
show $A; break; done
""",
    "while": r"""
set -- --a 1 --b; while [ $# -gt 0 ]; do case $1 in --a) A=$2; shift 2 ;; *) shift ;; esac; done; show "$A" $#
""",
    "retry": r"""
while true; do show once; break; done
""",
    "functions": r"""
f() { local A=$1; show $A; }
function g { f "$1 x"; }
A=0; g 1; f 2; show $A
""",
    "eval": r"""
A="show a 'b c'"; eval $A; B="show \$C"; C=c; eval "$B"
""",
    "command in a variable": r"""
A="show a b"; $A c; "show" d
""",
    "heredoc": r"""
cat > /dev/null <<EOF
show $X "not this
EOF
show this
cat <<-'END' > /dev/null
	show no
	END
show that
""",
    "redirections": r"""
show a > /dev/stdout b 2>&1 c 2>/dev/null
""",
    "pipes": r"""
show a | cat; { show b; } 2>&1 | cat; (show c)
""",
    "exports": r"""
export A=a B="b c"; readonly C=c; show $A "$B" $C; D=d E=$A; show $D$E
""",
    "for one command": r"""
A=a; A=b true; show $A
""",
    "subscripts": r"""
A=(4 8 16); I=1; show ${A[I]} ${A[$I]} ${A[$((I + 1))]}
""",
    "odd text": r"""
show a=b --x=y {c} [d] ~e 50% 'f$g' "h"i'j' !k
""",
    "placeholders in quotes": r"""
show '<PATH TO DATA>' "<A B>"
""",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to compare with")
@pytest.mark.parametrize("name", SCRIPTS)
def test_same_words_as_bash(name):
    ran = subprocess.run(["bash", "-c", PRELUDE + SCRIPTS[name]], capture_output=True, text=True, timeout=20)
    assert ran.stderr == "" and ran.returncode in (0, 1), ran.stderr
    read = invocations(SCRIPTS[name], (), {}, lambda path: None)
    shown = ["".join(f"[{word}]" for word in each.words[1:]) for each in read if each.words[0] == "show"]
    assert [line.replace("\ue000", "").replace("\ue001", "") for line in shown] == ran.stdout.splitlines()

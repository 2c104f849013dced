"""What is read from a script is what bash itself does with it: the same commands with the same words."""

import shutil
import subprocess

import pytest

from megatron.base.errors import ConfigError
from megatron.tooling.launch_script.shell.interpret import invocations
from megatron.tooling.launch_script.shell.unknown import unknowns

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
    "subshells": r"""
A=1; (A=2; show $A); show $A; { A=3; } | cat; show $A; A=4 & wait; show $A; f() ( A=5; show $A ); f; show $A
""",
    "subshell that ends": r"""
(exit 0); show after; (show in; exit 0; show not) | cat; f() { show f; exit 0; }; f; show not
""",
    "exit": r"""
A=1; if [ $A = 1 ]; then show a; exit 0; fi; show b
""",
    "exec ends the script": r"""
true || exec true; [ 1 = 2 ] && exec true; show a; exec true; show b
""",
    "sparse arrays": r"""
A=(); A[5]=f; A[1]=b; show "${A[@]}" ${!A[@]}; B=b; B[1]=c; show "${B[@]}"; unset 'A[1]'; show "${A[@]}"
""",
    "indices": r"""
A=(a b); for i in ${!A[@]}; do show $i ${A[$i]}; done; B=(x [3]=y z); show ${!B[@]}
""",
    "separators": r"""
A=a,b,c; IFS=,; show $A "$A"; B=(a b c); show "${B[*]}"; C=(p,q $A); show "${C[@]}"
""",
    "braces": r"""
show {a,b}c {1..3} x{1,2}{a,b} {a} {} '{a,b}' "{1..2}" {03..1} {a..c} {a,{b,c}} \{a,b} {1..9..4} "$A"{x,y}; A={a,b}; show $A
""",
    "braces in lists": r"""
for i in {1..3}; do show $i; done; A=(l{1,2}); show "${A[@]}"
""",
    "long loops": r"""
A=; for i in {1..100}; do A="$A $i"; done; show $A
""",
    "case that goes on": r"""
case a in a) show 1 ;& b) show 2 ;; c) show 3 ;; esac; case a in a) show 1 ;;& a) show 2 ;;& b) show 3 ;; esac
""",
    "counting loops": r"""
for ((i = 0; i < 6; i += 2)); do [ $i = 2 ] && continue; show $i; done; for ((;;)); do break; done; show $i
""",
    "arithmetic that sets": r"""
N=1; show $((N++)) $N $((N += 5)) $N $((++N)) $N; (( A = 3, B = A + 1 )); show $A $B
""",
    "bases": r"""
A=010; show $((010)) $((0x1F)) $((2#101)) $((10#08)) $((A + 1)) $((-A))
""",
    "anchored replacement": r"""
A=abc; show ${A/#a/x} ${A/%c/y} ${A/b} ${A//[ab]/z} ${A/#b/n} ${A//[!a]/_}; B=a/b; show ${B//\//_} "${B/'/'/-}"
L=(1 2); show "${L[@]/#/x}" "${L[@]/%/y}"
""",
    "quoted patterns": r"""
[ bc = 'b*' ] || show 1; [[ bc == "b*" ]] || show 2; [[ bc == b* ]] && show 3
P='a*'; case abc in "$P") show 4 ;; $P) show 5 ;; esac; A='a*b'; show "${A#"a*"}" "${A%\*b}"
""",
    "escapes": r"""
show $'\x41\102\u0043\'\\' $'a\qb'
""",
    "arguments by set": r"""
set a "b c"; show $# "$2"; set -e -o pipefail; show $#; set -f x; set +f; show "$@"; set --; show $#
""",
    "local without a value": r"""
f() { local x=1 y; y=3; show $x $y; }; x=9; f; show $x "y$y"
""",
    "declared by a name": r"""
N=V; V=1; declare "$N=7"; show $V; export "$N"=8; show $V
""",
    "assignments before builtins": r"""
A=1; A=2 eval 'show $A; B=3'; show $A $B; f() { C=$A; }; A=4 f; show $A $C
""",
    "levels of loops": r"""
for a in 1 2; do while true; do break 2; done; show no; done; show y
for a in 1 2; do for b in 1 2; do [ $b = 2 ] && continue 2; show $a $b; done; done
""",
    "status of functions": r"""
f() { return 1; }; f && show y || show n; g() { [ $1 = a ]; }; g a && show a; if g b; then show b; else show c; fi
""",
    "case in a command": r"""
A=$(case x in x) echo y ;; (z) (echo a) ;; esac); show ok
B="$(for i in 1; do case $i in 1|2) echo ")" ;; esac; done)"; show ok
A=$(echo in case esac in); show $A
""",
    "commands with any quotes": r"""
A=$(awk 'BEGIN{print "a)"}'); B="$(echo "$(echo ")")" | awk '{print "x"}')"; show ok "`echo \"a b\"`"
C=$(cat <<'E'
it's a ) "quote
E
); D=$(
# it's a comment )
awk '{print $1}' /dev/null
); show ok
""",
    "long counting": r"""
i=0; while [ $i -lt 100 ]; do i=$((i+1)); done; show $i; for ((j=0;j<100;j++)); do :; done; show $j
""",
    "separators put back": r"""
OLD=$IFS; IFS=:; A=a:b; for x in $A; do show $x; done; IFS=$OLD; B="c d"; show $B
""",
    "shift beyond the end": r"""
set -- 1 2 3; shift 2; shift 3; show $#
""",
    "several options": r"""
set -- -l 4 -bc x; while getopts l:bc o; do show $o "$OPTARG"; done; shift $((OPTIND - 1)); show "$@"
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


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("declare -A M=([a]=1 [b]=2)\nshow ${M[@]}", "${M[@]}"),  # in the order of a hash
        ("A=$(echo a > file)\nshow $A", "$(echo a > file)"),
        ("IFS=, read -ra A <<< 'a,b'\nshow ${A[@]}", "${A[@]}"),
        ("mapfile -t A < file\nshow ${A[@]}", "${A[@]}"),
        ("B=a\nA=${B/a/[&]}\nshow $A", "${B/a/[&]}"),
        ("A=3\n(( A++ > 2 ))\nshow $A", "$A"),
    ],
)
def test_unknown_and_not_guessed(text, unknown):
    (found,) = invocations(text, (), {}, lambda path: None)
    assert unknowns(found.words[1]) == [unknown]


@pytest.mark.parametrize("text", ["declare -i N=3", "local -n R=V"])
def test_attributes_that_change_assignments_are_refused(text):
    with pytest.raises(ConfigError, match=r"line 2 of the script: .* changes what an assignment means"):
        invocations(f"A=1\n{text}", (), {}, lambda path: None)


def test_a_guard_does_not_end_the_script():
    """An exit with an error, or behind a condition that only a run could decide, is passed over."""
    for guard in ('[ -z "$DATA" ] && exit 0', 'if [ -z "$DATA" ]; then exit; fi', "[ -d data ] || exit 0", "exit 1"):
        assert [each.words for each in invocations(f"{guard}\nshow a", (), {}, lambda path: None)][-1] == ("show", "a")

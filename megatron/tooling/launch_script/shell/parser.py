"""The grammar of bash: converts a script's text to its statements."""

from __future__ import annotations

import re

from megatron.tooling.launch_script.shell.cursor import METACHARACTERS, Cursor
from megatron.tooling.launch_script.shell.syntax import (
    Arithmetic,
    Arm,
    Assignment,
    Case,
    Chain,
    CommandGroup,
    For,
    Function,
    If,
    Not,
    Script,
    Simple,
    Statement,
    Subshell,
    Test,
    While,
    Word,
    WordPart,
    literal,
)

DECLARERS = ("export", "declare", "local", "readonly", "typeset")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]*)\])?(\+?)=")
_KEYWORD = re.compile(
    r"(?:if|then|elif|else|fi|case|esac|for|select|while|until|do|done|function|!|[{}]|\[\[)(?=[\s;()&|]|$)"
)
_TEST_OPERATORS = ("&&", "||", "<", ">", "(", ")")


def parse(text: str) -> Script:
    """Returns the statements of a script. Raises ConfigError with the line that cannot be read."""
    parser = _Parser(Cursor(text.replace("\r\n", "\n")))
    body = parser.statements()
    if parser.cursor.at < len(parser.cursor.text):
        raise parser.cursor.error(f"'{parser.cursor.text[parser.cursor.at]}' is not expected here")
    return Script(body, frozenset(parser.names))


def parse_word(text: str, quoted: bool) -> Word:
    """Returns all of `text` as one word, including blanks, as in `${name:-text}`. `quoted`: whether quotes surround
    it."""
    word = Cursor(text).word(stops="")
    parts = word.parts if word else ()
    return Word(tuple(WordPart(part.kind, part.text, part.quoted or quoted) for part in parts))


class _Parser:
    """Each method reads the construct that it is named after, from the cursor on."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.names: set[str] = set()

    def statements(self, *ends: str) -> tuple[Statement, ...]:
        """Reads statements up to one of the keywords or operators `ends`, which is skipped, or to the end of the
        block."""
        statements: list[Statement] = []
        while True:
            self._separators()
            if not self._more() or self._keyword() in ends:
                break
            before = self.cursor.at
            statement = self._chain()
            if self.cursor.at == before:
                raise self.cursor.error(f"'{self.cursor.text[before]}' is not expected here")
            statements.append(Subshell((statement,)) if self.cursor.starts("&") else statement)
        if ends and not any(self._take(end) for end in ends):
            raise self.cursor.error(f"'{ends[-1]}' is missing")
        return tuple(statements)

    def _separators(self) -> None:
        self.cursor.lines()
        while self.cursor.starts(";", "&") and not self.cursor.starts(";;", "&&", ";&"):
            self.cursor.at += 1
            self.cursor.lines()

    def _more(self) -> bool:
        return self.cursor.at < len(self.cursor.text) and not self.cursor.starts(")", ";;", ";&")

    def _keyword(self) -> str | None:
        match = _KEYWORD.match(self.cursor.text, self.cursor.at)
        return match[0] if match else None

    def _take(self, text: str) -> bool:
        self.cursor.lines()
        return self.cursor.take(text)

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self.cursor.error(f"'{text}' is missing")

    def _chain(self) -> Statement:
        left = self._pipeline()
        while True:
            self.cursor.blanks()
            if self.cursor.take("&&"):
                self.cursor.lines()
                left = Chain(left, "&&", self._pipeline())
            elif self.cursor.take("||"):
                self.cursor.lines()
                left = Chain(left, "||", self._pipeline())
            else:
                return left

    def _pipeline(self) -> Statement:
        self.cursor.blanks()
        if self._keyword() == "!":
            self.cursor.at += 1
            return Not(self._pipeline())
        commands = [self._command()]
        while True:
            self.cursor.blanks()
            if self.cursor.starts("||") or not (self.cursor.take("|&") or self.cursor.take("|")):
                return (
                    commands[0]
                    if len(commands) == 1
                    else CommandGroup(tuple(Subshell((command,)) for command in commands))
                )
            self.cursor.lines()
            commands.append(self._command())

    def _command(self) -> Statement:
        readers = {
            "if": self._if,
            "case": self._case,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "function": self._function,
            "{": lambda: CommandGroup(self._block("{", "}")),
            "[[": self._test,
        }
        keyword = self._keyword()
        statement: Statement
        if keyword in readers:
            statement = readers[keyword]()
        elif self.cursor.take("(("):
            return Arithmetic(self.cursor.arithmetic())
        elif self.cursor.starts("("):
            statement = Subshell(self._block("(", ")"))
        else:
            return self._simple()
        self._redirections()
        return statement

    def _redirections(self) -> None:
        self.cursor.blanks()
        while self.cursor.redirection():
            self.cursor.blanks()

    def _block(self, opening: str, closing: str) -> tuple[Statement, ...]:
        self._expect(opening)
        return self.statements(closing)

    def _if(self) -> Statement:
        arms: list[Arm] = []
        otherwise = None
        self._expect("if")
        while True:
            start = self.cursor.at
            condition = self.statements("then")
            text = self.cursor.text[start : self.cursor.at - len("then")].strip(" \t\n;")
            body: list[Statement] = []
            end = self._until_one_of(body, "elif", "else", "fi")
            arms.append(Arm(text, condition, tuple(body)))
            if end == "else":
                otherwise = self.statements("fi")
            if end != "elif":
                return If(tuple(arms), otherwise)

    def _until_one_of(self, body: list[Statement], *ends: str) -> str:
        body += self.statements(*ends)
        return next(end for end in ends if self.cursor.text.endswith(end, 0, self.cursor.at))

    def _case(self) -> Statement:
        start = self.cursor.at
        self._expect("case")
        word = self.cursor.need_word()
        text = self.cursor.text[start : self.cursor.at]
        self._expect("in")
        arms = []
        while not self._take("esac"):
            self._take("(")
            patterns = [self.cursor.need_word()]
            while self._take("|"):
                patterns.append(self.cursor.need_word())
            self._expect(")")
            body = self.statements()
            operator = next((text for text in (";;&", ";;", ";&") if self._take(text)), "")
            if not operator and self._keyword() != "esac":
                raise self.cursor.error("'esac' is missing")
            arms.append((tuple(patterns), body, operator))
        return Case(text, word, tuple(arms))

    def _for(self) -> Statement:
        self.cursor.word()
        self.cursor.blanks()
        if self.cursor.take("(("):
            return self._counting(self.cursor.arithmetic().split(";"))
        name, words = literal(self.cursor.need_word()), None
        self.cursor.lines()
        if self.cursor.starts_word("in"):
            self.cursor.at += 2
            words = self._words()
        return For(name, words, self._loop_body())

    def _counting(self, parts: list[str]) -> Statement:
        if len(parts) != 3:
            raise self.cursor.error("for (( needs three expressions")
        start, condition, step = parts
        loop = While((Arithmetic(condition if condition.strip() else "1"),), self._loop_body(), False, step)
        return CommandGroup((Arithmetic(start), loop) if start.strip() else (loop,))

    def _loop_body(self) -> tuple[Statement, ...]:
        self._separators()
        return self._block("{", "}") if self.cursor.starts("{") else self._block("do", "done")

    def _while(self) -> Statement:
        until = self.cursor.starts("until")
        self.cursor.word()
        condition = self.statements("do")
        return While(condition, self.statements("done"), until)

    def _function(self) -> Statement:
        self._expect("function")
        name = literal(self.cursor.need_word())
        if self._take("("):
            self._expect(")")
        self.cursor.lines()
        return Function(name, self._command())

    def _test(self) -> Statement:
        self._expect("[[")
        words: list[Word] = []
        while True:
            self.cursor.lines()
            if self.cursor.starts_word("]]"):
                self.cursor.at += 2
                return Test(tuple(words))
            operator = next((text for text in _TEST_OPERATORS if self.cursor.take(text)), None)
            pattern = bool(words) and literal(words[-1]) == "=~"
            word = (
                Word((WordPart("text", operator, False),))
                if operator
                else self.cursor.word(" \t\n" if pattern else METACHARACTERS)
            )
            if word is None:
                raise self.cursor.error("']]' is missing")
            words.append(word)

    def _simple(self) -> Statement:
        assignments: list[Assignment] = []
        words: list[Word] = []
        redirected = False
        while True:
            self.cursor.blanks()
            if self.cursor.redirection():
                redirected = True
                continue
            declares = not words or literal(words[0]) in DECLARERS
            assignment = self._assignment() if declares else None
            if assignment is not None:
                assignments.append(assignment)
                continue
            word = self.cursor.word()
            if word is None:
                return Simple(tuple(assignments), tuple(words), redirected)
            if words and literal(words[0]) in ("declare", "local", "typeset"):
                option = re.fullmatch(r"-[a-zA-Z]*([in])[a-zA-Z]*", literal(word))
                if option is not None:
                    raise self.cursor.error(f"{literal(words[0])} -{option[1]} changes what an assignment means")
            words.append(word)
            if len(words) == 1 and not assignments and self._empty_parentheses():
                self.cursor.lines()
                return Function(literal(word), self._command())

    def _empty_parentheses(self) -> bool:
        match = re.compile(r"[ \t]*\([ \t]*\)").match(self.cursor.text, self.cursor.at)
        self.cursor.at = match.end() if match else self.cursor.at
        return match is not None

    def _assignment(self) -> Assignment | None:
        match = _ASSIGNMENT.match(self.cursor.text, self.cursor.at)
        if match is None:
            return None
        start = self.cursor.at
        self.cursor.at = match.end()
        index = parse_word(match[2], quoted=True) if match[2] is not None else None
        value = self._array() if self.cursor.take("(") else self.cursor.word() or Word(())
        text = self.cursor.text[start : self.cursor.at]
        if re.search(rf"\$\{{?{match[1]}\b", text) is None and not match[3]:
            self.names.add(match[1])
        return Assignment(match[1], index, bool(match[3]), value)

    def _array(self) -> tuple[tuple[Word | None, Word], ...]:
        elements: list[tuple[Word | None, Word]] = []
        while not self._take(")"):
            key = re.compile(r"\[([^\]\n]*)\]=").match(self.cursor.text, self.cursor.at)
            self.cursor.at = key.end() if key else self.cursor.at
            elements.append((parse_word(key[1], quoted=True) if key else None, self.cursor.need_word()))
        return tuple(elements)

    def _words(self) -> tuple[Word, ...]:
        words: list[Word] = []
        self.cursor.blanks()
        while (word := self.cursor.word()) is not None:
            words.append(word)
            self.cursor.blanks()
        return tuple(words)

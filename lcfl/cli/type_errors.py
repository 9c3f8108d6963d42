"""Rewrites what jsonargparse says about a value of a wrong type: what was expected, and what was given."""

import re

__all__ = ["WORDS", "is_union", "without_types"]

WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "NoneType": "null",
    "null": "null",
    "dict": "a mapping",
    "Mapping": "a mapping",
    "list": "a list",
    "tuple": "a list",
    "Iterable": "a list",
    "Sequence": "a list",
}
NUMBERS = "a list of numbers"  # as which a tensor is written
CALLABLE = re.compile(r"Type .*? expects a function or a callable class:\s+(?=Parser key|No module|'\w+' object)")
NO_MODULE = re.compile(r"No module named ('[\w.]+')(?:\. Got value: .*)?", re.DOTALL)
NO_INTEGER = re.compile(r"(?:- )?invalid literal for int\(\) with base 10: ")
NO_MAPPING = re.compile(r"'(\w+)' object has no attribute 'keys'.*", re.DOTALL)
ONE_WORD = re.compile(r"(?!(?:None|True|False)$)[A-Za-z_][\w.]*")
PATH = re.compile(r"\n?\s*- Expected a path but .* either not accessible or invalid\n\s*(?:- )?")
NESTED = re.compile(  # a class that may be null, of which an argument may be null, too
    r"Does not validate against any of the Union subtypes\s+Subtypes: [^\n]*\s+Errors:\n"
    r"(?P<margin> *)- (?P<problem>Problem with given class_path .*?)\n(?P=margin)- .*",
    re.DOTALL,
)
UNION = re.compile(
    r"Does not validate against any of the Union subtypes\s+Subtypes: .*\s+Errors:\n(?P<errors>.*?)"
    r"\n\s*Given value type: .*\s+Given value: (?P<got>.*?)(?:\. Got value: Namespace.*)?\s*$",
    re.DOTALL,
)
ONE = re.compile(r"Expected an? (.+?)\. Got value: (.*?)(?:\. Got value: Namespace.*)?$", re.DOTALL)
ITEM = re.compile(r"Not a valid subclass of \w+\. Got value: (.*)")
OF_CLASS = re.compile(
    r"Expected a dot import path string|(?:Import path does not correspond to|Not a valid) (?:a )?subclass"
)


def is_union(message: str) -> bool:
    """Returns whether a message lists why a value is none of several types."""
    return UNION.search(message) is not None


def without_types(message: str) -> str:
    """Returns a message without Python's types.

    If one of several allowed types has a reason of its own, such as a class that refused its arguments, the reason
    alone is the message.
    """
    message = NO_INTEGER.sub("expected a whole number, got ", PATH.sub(" ", CALLABLE.sub("", message)))
    message = NO_MODULE.sub(r"there is no module \1, neither in the current folder nor installed", message)
    message = NESTED.sub(r"\g<problem>", message)
    if match := NO_MAPPING.search(message):
        return f"{message[: match.start()]}expected a mapping as init_args, got {WORDS.get(match[1], match[1])}"
    if match := UNION.search(message):
        lines = re.split(
            r"(?:^|\n)\s*- (?=Expected|Not (?:a valid|of type)|Import path|[A-Z]\w+: |Problem)", match["errors"]
        )
        reasons = [line.strip().removeprefix("- ") for line in lines if line.strip()]
        for item in filter(None, map(ITEM.match, reasons)):
            if item[1] != match["got"]:  # an item of a mapping or list, and not the whole of it
                return f"{message[: match.start()]}expected a class, got {item[1]} in {match['got']}"
        expected = [_word(reason) for reason in reasons]
        own = [reason for reason, word in zip(reasons, expected, strict=True) if word is None]
        words = list(dict.fromkeys(map(str, expected)))
        if "a number" in words:  # any other number is one, too, and a tensor of one number needs no list
            words = [word for word in words if word not in ("a whole number", NUMBERS)]
        said = own[0] if own else _expected(words, match["got"])
        return message[: match.start()] + said
    if (match := ONE.search(message)) and (word := _word(f"Expected a {match[1]}")):
        return message[: match.start()] + _expected([word], match[2].strip())
    return message


def _expected(words: list[str], got: str) -> str:
    """Returns what was expected instead of a value. For a single word instead of a list, it says how to write one."""
    is_item = "a list" in words and not {*words} - {"a list", "null"} and ONE_WORD.fullmatch(got)
    return f"expected {' or '.join(words)}, got {got}{f'; write [{got}]' * bool(is_item)}"


def _word(reason: str) -> str | None:
    """Returns what a reason says was expected; None for a reason of another kind."""
    if OF_CLASS.match(reason):
        return "a class"
    if reason.startswith("Not of type Tensor"):
        return NUMBERS
    if match := re.match(r"Expected a tuple with (\d+) elements", reason):
        return f"a list of {match[1]} values"
    if match := re.match(r"Expected an? (?:<class ')?(?:[\w.]+\.)?(\w+)", reason):
        return WORDS.get(match[1])
    return None

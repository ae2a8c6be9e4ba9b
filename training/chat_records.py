"""A record of a file as a conversation: the usual shapes, and what can be wrong with them.

Shapes: `messages` of role and content, `conversations` of from and value (ShareGPT), `prompt` and `completion`, each
of which is text or messages. `tools` are the functions offered, `system` is a text before all messages,
`chat_template_kwargs` are arguments of the template. An answer of `weight` 0 is not learnt.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

CONVERSATION_COLUMNS = ("messages", "conversations", "prompt", "completion")
OTHER_COLUMNS = ("tools", "chat_template_kwargs", "system", "functions")
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"} | {role: role for role in ROLES}
REASONING = ("reasoning_content", "reasoning", "thinking")  # what one thing is called in different places
KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "missing"}


class BadRow(ValueError):
    """Something is wrong with a row."""


class AmbiguousColumns(ValueError):
    """A row has several columns that could be its conversation. An option settles it, so no row is skipped for it."""


@dataclass(frozen=True)
class Conversation:
    """Chat messages that end with an answer.

    answers: indices of the messages that may be learnt. template_options: arguments of the chat template.
    """

    messages: tuple[dict, ...]
    answers: tuple[int, ...]
    tools: tuple[dict, ...] | None = None
    template_options: dict | None = None


def conversation_of(record: bytes, columns: tuple[str, ...] = ()) -> Conversation:
    """The conversation that a record, JSON text, is of.

    What follows the last answer is left out: nothing before it can see it, and nothing is learnt from it.

    Args:
        columns: the column of the conversation, or a prompt's and a completion's, where the usual names are not used.

    Raises:
        BadRow: what is wrong with the record, without its place.
        AmbiguousColumns: it has several columns that could be the conversation.
    """
    row = _parsed(record)
    if row.get("functions"):
        raise BadRow("functions are an older form, which chat templates do not write: give them as tools")
    names = columns or _columns_of(row)
    if missing := [name for name in names if row.get(name) is None]:
        raise BadRow(f"there is no {' and no '.join(missing)}, but {_listed(row)}")
    if len(names) == 1:
        messages, first = _messages(row[names[0]], names[0]), 0
    else:
        prompt = _messages(row[names[0]], names[0], "user")
        messages, first = prompt + _messages(row[names[1]], names[1], "assistant"), len(prompt)
    answers = [at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"]
    given = [message for name in names for message in (row[name] if isinstance(row[name], list) else [row[name]])]
    answers = [at for at in answers if _weight(given[at], f"message {at + 1}")]
    if system := _system(row):
        if messages[0]["role"] == "system":
            raise BadRow("there is a system text beside a first message of the role system: leave one out")
        messages, answers = [system, *messages], [at + 1 for at in answers]
    if not answers:
        raise BadRow(f"{names[-1]} has no message of an assistant, so there is nothing to learn")
    conversation = Conversation(
        tuple(messages[: answers[-1] + 1]), tuple(answers), _tools(row.get("tools")), _template_options(row)
    )
    for text in texts_of(conversation):
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise BadRow(f"half of a surrogate pair is no character: {text[:60]!a}")
    return conversation


def texts_of(conversation: Conversation) -> Iterator[str]:
    """All text of a conversation, the names of fields too."""
    yield from _texts(conversation.messages)
    yield from _texts(conversation.tools or ())


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _parsed(record: bytes) -> dict:
    try:
        row = json.loads(record.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: byte {error.start} is {record[error.start]:#04x}") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        hint = ": a file of one JSON list must be made one of JSON lines, a row each" if isinstance(row, list) else ""
        raise BadRow(f"not a JSON object, but {_kind(row)}{hint}")
    return row


def _columns_of(row: dict) -> tuple[str, ...]:
    shapes = [("messages",), ("conversations",), ("prompt", "completion")]
    found = [shape for shape in shapes if all(row.get(name) is not None for name in shape)]
    if not found:
        raise BadRow(f"there are no messages, no conversations and no prompt with a completion, but {_listed(row)}")
    if len(found) > 1:
        names = " and ".join("prompt with completion" if len(shape) > 1 else shape[0] for shape in found)
        ways = " or ".join(repr(",".join(shape)) for shape in found)
        raise AmbiguousColumns(f"there are {names}: say by `column` which to learn, {ways}")
    return found[0]


def _messages(given: object, name: str, role_of_text: str | None = None) -> list[dict]:
    """Messages of a column's value; text alone is one message of `role_of_text`."""
    if role_of_text and isinstance(given, str):
        given = [{"role": role_of_text, "content": given}]
    if not isinstance(given, list):
        raise BadRow(f"{name} must be a list of messages{' or text' if role_of_text else ''}, not {_kind(given)}")
    if not given:
        raise BadRow(f"{name} is an empty list")
    return [_message(message, f"message {number} of {name}") for number, message in enumerate(given, start=1)]


def _message(given: object, place: str) -> dict:
    if not isinstance(given, dict):
        raise BadRow(f"{place} must be an object, not {_kind(given)}")
    sharegpt = "from" in given and "role" not in given
    role = _role(given.get("from" if sharegpt else "role"), SHAREGPT_ROLES if sharegpt else ROLES, place)
    content, is_answer = given.get("value" if sharegpt else "content"), role == "assistant"
    calls = _calls(given["tool_calls"], place) if given.get("tool_calls") else []
    thoughts = [given[name] for name in REASONING if given.get(name)]
    if not is_answer and (calls or thoughts):
        raise BadRow(f"{place} has {'tool_calls' if calls else 'reasoning'}, but is of role {role}")
    message = {"role": role, "content": "" if content is None and calls else _content(content, place)}
    if not message["content"].strip() and not calls and role != "tool":
        raise BadRow(f"{place}, of role {role}, is empty")
    if thoughts:
        if not isinstance(thoughts[0], str):
            raise BadRow(f"{place} has reasoning that must be text, not {_kind(thoughts[0])}")
        message["reasoning_content"] = thoughts[0]
    # A tool's answer can say what it answers; some templates write that.
    named = {name: given[name] for name in ("name", "tool_call_id") if isinstance(given.get(name), str)}
    return message | ({"tool_calls": calls} if calls else {}) | named


def _system(row: dict) -> dict | None:
    """What ShareGPT has beside the conversation instead of in it."""
    text = row.get("system")
    if text in (None, ""):
        return None
    if not isinstance(text, str):
        raise BadRow(f"system must be text, not {_kind(text)}")
    return {"role": "system", "content": text}


def _weight(given: object, place: str) -> bool:
    """Whether an answer is learnt: OpenAI's weight, 0 or 1."""
    weight = given.get("weight") if isinstance(given, dict) else None
    if weight not in (None, 0, 1):
        raise BadRow(f"{place} has the weight {weight!r}, but must have 0 or 1")
    return weight is None or weight == 1


def _role(given: object, roles: dict[str, str] | tuple[str, ...], place: str) -> str:
    if given is None:
        raise BadRow(f"{place} has no role")
    if not isinstance(given, str) or given not in roles:
        raise BadRow(f"{place} has the role {given!r}, which is none of {', '.join(roles)}")
    return roles[given] if isinstance(roles, dict) else given


def _content(given: object, place: str) -> str:
    """Text, or the text of a list of text parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise BadRow(f"{place} has a content that must be text or a list of text parts, not {_kind(given)}")
    for part in given:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            found = f"of type {part.get('type')!r}" if isinstance(part, dict) else f"that is {_kind(part)}"
            raise BadRow(f"{place} has a part {found}, but only text can be learnt")
    return "".join(part["text"] for part in given)


def _calls(given: object, place: str) -> list[dict]:
    if not isinstance(given, list):
        raise BadRow(f"{place} has tool_calls that must be a list, not {_kind(given)}")
    return [_call(call, place) for call in given]


def _call(given: object, place: str) -> dict:
    """A call with a mapping of arguments: OpenAI sends them as JSON text, which Qwen's template refuses."""
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{place} has a tool call without the name of a function")
    arguments = _from_json(function.get("arguments") or {})
    if not isinstance(arguments, dict):
        raise BadRow(f"{place} calls {function['name']} with arguments that are no JSON object")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(given: object) -> tuple[dict, ...] | None:
    """The functions offered; a list, or the JSON text of one, as tables of mixed schemas have it."""
    tools = _from_json(given)
    if tools in (None, [], ""):
        return None
    if not isinstance(tools, list):
        raise BadRow(f"tools must be a list, not {_kind(tools)}")
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"tool {number} has no name of a function")
    return tuple(tools)


def _template_options(row: dict) -> dict:
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise BadRow(f"chat_template_kwargs must be an object, not {_kind(options)}")
    return options


def _from_json(given: object) -> object:
    """What text is the JSON of, or the text itself if it is not JSON."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given


def _kind(value: object) -> str:
    return KINDS.get(type(value), f"the number {value}")


def _listed(row: dict) -> str:
    return ", ".join(row) or "nothing"

"""Asks an SGLang server over `/generate`, token ids in and out, and believes no answer that it has not checked.

What fails for a while (no connection, a server's fault, an answer that is cut or makes no sense) is asked for again, a
bounded number of times, with growing pauses. What the server refuses (4xx) is not: it would be refused again.
"""

import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
LONGEST_PAUSE = 30.0
FINISH_REASONS = ("stop", "length")


class Unusable(ValueError):
    """An answer that cannot be taken; another try may bring a better one."""


class Refused(ValueError):
    """The server's own no: the request is at fault, or the caller may not ask."""


@dataclass
class Answer:
    id: str | None  # the server's name of the request, which its steps bear too
    output: list[int]
    finish_reason: str


@dataclass
class Server:
    """Where to ask, and how patiently.

    timeout: seconds without a byte after which a try is given up. tries: of each request, in all. pause: seconds
    before the second try; doubled before each later one, up to half a minute.
    """

    url: str
    timeout: float = 600.0
    tries: int = 8
    pause: float = 1.0

    def __post_init__(self):
        parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
        if parts.scheme not in CONNECTIONS or not parts.hostname:
            raise ValueError(f"`url` is {self.url!r}, but must be like http://HOST:PORT")
        if self.tries < 1:
            raise ValueError(f"`tries` is {self.tries}, but must be at least 1")
        self._kind, self._host, self._port = CONNECTIONS[parts.scheme], parts.hostname, parts.port
        self._path = parts.path.rstrip("/")

    def about(self, name: str) -> dict:
        """`/server_info` or `/model_info`, which older servers have as `/get_server_info` and `/get_model_info`."""

        def attempt() -> dict:
            try:
                return self._json("GET", f"/{name}")
            except Refused:
                return self._json("GET", f"/get_{name}")

        return self._patiently(name, attempt)

    def generate(
        self,
        name: str,
        prompt: list[int],
        sampling: dict,
        vocabulary: int | None = None,
        stream: bool = False,
        incremental: bool = False,
    ) -> Answer:
        """The checked answer to one request, which `name` names in messages.

        Args:
            incremental: each event of the stream brings the new ids, not all so far.
        Raises:
            Refused: the server refuses the request. Unusable: no try brought an answer that can be taken.
        """
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": stream}

        def attempt() -> Answer:
            if stream:
                with self._opened("POST", "/generate", body) as response:
                    answer = joined(events(response), incremental)
            else:
                answer = self._json("POST", "/generate", body)
            return checked(answer, prompt, sampling, vocabulary)

        return self._patiently(name, attempt)

    def _patiently(self, name: str, attempt: Callable[[], T]) -> T:
        for number in range(1, self.tries + 1):
            try:
                return attempt()
            except Refused as error:
                raise Refused(f"{name}: {error}") from None
            except (Unusable, OSError, http.client.HTTPException) as error:
                why = f"{name}, try {number} of {self.tries}: {error or type(error).__name__}"
                if number == self.tries:
                    raise Unusable(why) from error
            print(why, file=sys.stderr)
            time.sleep(min(LONGEST_PAUSE, self.pause * 2 ** (number - 1)))
        raise AssertionError("unreachable")

    def _json(self, method: str, path: str, body: dict | None = None) -> dict:
        with self._opened(method, path, body) as response:
            return parsed(response.read())

    @contextmanager
    def _opened(self, method: str, path: str, body: dict | None) -> Iterator[http.client.HTTPResponse]:
        """A response whose status is 200. Each has a connection of its own, which is closed at the end or where an
        error is raised: SGLang then aborts what it may still be at."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("SGLANG_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        connection = self._kind(self._host, self._port, timeout=self.timeout)
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(1000).decode(errors="replace")
                raise failure(response.status)(f"status {response.status}: {text}")
            yield response
        finally:
            connection.close()


def failure(status: object) -> type[ValueError]:
    """What a status says about another try."""
    return Refused if isinstance(status, int) and 300 <= status < 500 else Unusable


def parsed(text: bytes) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Unusable(f"the answer is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise Unusable(f"the answer is no object: {text[:60]!r}")
    return value


def events(lines: Iterable[bytes]) -> Iterator[dict]:
    """The objects of a stream of server-sent events."""
    for line in lines:
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield parsed(data)


def joined(stream: Iterable[dict], incremental: bool = False) -> dict:
    """A streamed answer as one object.

    Raises:
        Unusable: the stream ends before its finish reason, goes on after it, or takes back what it has said.
    """
    ids, last = [], None
    for event in stream:
        raise_for(event)
        if last and finish_of(last):
            raise Unusable("the stream goes on after its finish reason")
        new = event.get("output_ids")
        if not isinstance(new, list):
            raise Unusable(f"an event of the stream has the `output_ids` {new!r}")
        if not incremental and new[: len(ids)] != ids:
            raise Unusable(f"the stream takes back ids: {ids} has become {new}")
        ids, last = ids + new if incremental else new, event
    if last is None or not finish_of(last):
        raise Unusable(f"the stream is cut after {len(ids)} ids: it has no finish reason")
    return last | {"output_ids": ids}


def raise_for(answer: dict) -> None:
    """Raises what a stream, whose status was sent long before, can only say in an event: an error, an abort."""
    finish = finish_of(answer) or {}
    error = answer.get("error") or (finish if finish.get("type") == "abort" else None)
    if error:
        status = (error.get("code") or error.get("status_code")) if isinstance(error, dict) else None
        raise failure(status)(f"the server says {error}")


def finish_of(answer: dict) -> dict | None:
    meta = answer.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    return reason if isinstance(reason, dict) else None


def checked(answer: dict, prompt: list[int], sampling: dict, vocabulary: int | None) -> Answer:
    """An answer, if everything it says can be so.

    Raises:
        Unusable: something cannot. Refused: it is a refusal.
    """
    raise_for(answer)
    ids, reason, meta = answer.get("output_ids"), finish_of(answer), answer.get("meta_info")
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise Unusable(f"`output_ids` is {str(ids)[:60]}, but must be a list of ids")
    wrong = [token for token in ids if token < 0 or (vocabulary is not None and token >= vocabulary)]
    if wrong:
        raise Unusable(f"`output_ids` has {wrong[0]}, but the vocabulary has {vocabulary} tokens")
    if len(ids) > sampling["max_new_tokens"]:
        raise Unusable(f"`output_ids` has {len(ids)} ids, but at most {sampling['max_new_tokens']} were asked for")
    if reason is None or reason.get("type") not in FINISH_REASONS:
        raise Unusable(f"`finish_reason` is {reason}, but must be one of {', '.join(FINISH_REASONS)}")
    for name, count in (("prompt_tokens", len(prompt)), ("completion_tokens", len(ids))):
        if meta.get(name, count) != count:
            raise Unusable(f"`{name}` is {meta[name]}, but there are {count}")
    return Answer(meta.get("id"), ids, reason["type"])

"""A server that speaks as much of SGLang as the recorder asks for, and misbehaves as it is told to."""

import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

INFO = {
    "version": "0.0",
    "dllm_algorithm": "LowConfidence",
    "dllm_algorithm_config": {"threshold": 0.9, "block_size": 4},
    "dtype": "float32",
    "attention_backend": "none",
    "device": "cpu",
    "random_seed": 0,
    "skip_tokenizer_init": True,
    "api_key": "a secret",
}
VOCABULARY, MASK = 50, 49


def answer_to(body: dict) -> dict:
    """What the server says when it behaves: ids that follow from the prompt."""
    prompt, budget = body["input_ids"], body["sampling_params"]["max_new_tokens"]
    ids = [(sum(prompt) + i) % MASK for i in range(budget)]
    meta = {"id": f"of {prompt}", "finish_reason": {"type": "length", "length": budget}}
    return {"output_ids": ids, "meta_info": meta | {"prompt_tokens": len(prompt), "completion_tokens": budget}}


def stream_of(answer: dict) -> list[dict]:
    """An answer as the events of a stream: every other id, then the whole."""
    ids, meta = answer["output_ids"], answer["meta_info"]
    begun = meta | {"finish_reason": None}
    parts = [
        {"output_ids": ids[:end], "meta_info": begun | {"completion_tokens": end}} for end in range(0, len(ids), 2)
    ]
    return [*parts, answer]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        about = {f"/{server.prefix}server_info": server.info, f"/{server.prefix}model_info": server.served}
        self.say(json.dumps(about.get(self.path, {})).encode(), 200 if self.path in about else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            behave = self.server.behaviours.pop(0) if self.server.behaviours else behaving
        try:
            behave(self, body)
        except BrokenPipeError:
            pass  # the client has gone: it was tired of waiting

    def say(self, data: bytes, status: int = 200, sent: int | None = None) -> None:
        """Sends a body, or as much of it as `sent`, and then hangs up."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:sent])
        self.close_connection = True

    def stream(self, events: list[dict | str], is_cut: bool = False) -> None:
        """Sends events, then the end of the stream; or hangs up instead."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in [*events, *([] if is_cut else ["[DONE]"])]:
            data = b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n"
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        if not is_cut:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True


Behaviour = Callable[[Handler, dict], None]


def behaving(handler: Handler, body: dict) -> None:
    saying()(handler, body)


def saying(ids: list | None = None, **meta) -> Behaviour:
    """Other ids, and other things beside them, than the server would say; where it says them it misbehaves."""

    def behave(handler: Handler, body: dict) -> None:
        good = answer_to(body)
        answer = {
            "output_ids": good["output_ids"] if ids is None else ids,
            "meta_info": {k: v for k, v in (good["meta_info"] | meta).items() if v is not ...},
        }
        if body["stream"]:
            handler.stream(stream_of(answer))
        else:
            handler.say(json.dumps(answer).encode())

    return behave


def failing(status: int, text: str = "no") -> Behaviour:
    return lambda handler, body: handler.say(json.dumps({"error": {"message": text}}).encode(), status)


def cut(handler: Handler, body: dict) -> None:
    """Hangs up in the middle of the answer."""
    if body["stream"]:
        handler.stream(stream_of(answer_to(body))[:-1], is_cut=True)
    else:
        data = json.dumps(answer_to(body)).encode()
        handler.say(data, sent=len(data) // 2)


def ended_early(handler: Handler, body: dict) -> None:
    """Ends the answer, as if all were well, before it is whole."""
    if body["stream"]:
        handler.stream(stream_of(answer_to(body))[:-1])
    else:
        handler.say(json.dumps(answer_to(body)).encode()[:-20])


def hanging_up(handler: Handler, body: dict) -> None:
    handler.close_connection = True


def silent(handler: Handler, body: dict) -> None:
    """Says nothing for longer than a test waits."""
    time.sleep(2)
    handler.close_connection = True


@contextmanager
def misbehaving_server(port: int = 0):
    """A running server: its `behaviours` are used up one a request, `asked` has all that it was asked."""
    ThreadingHTTPServer.allow_reuse_address = True
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.behaviours, server.asked, server.keys, server.lock = [], [], [], Lock()
    server.info, server.served, server.prefix = dict(INFO), {"architectures": ["SDARForCausalLM"]}, ""
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()

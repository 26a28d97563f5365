"""What the demo says to the server, and what it reads in the answers."""

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from examples.servers import BLOCK_TOKENS, MODEL_NAME, Failed

WORDS = (
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "large",
    "language",
    "model",
    "keeps",
    "key",
    "value",
    "cache",
    "context",
    "document",
    "question",
)
ANSWER_TOKENS = 16
TIMEOUT_S = 120

Message = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One streamed answer. `first_token_ms` from sending the request; `cached_tokens` as the engine reports them."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    first_token_ms: float
    usage: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


def words(seed: object, count: int) -> str:
    """`count` words that depend on nothing but the seed."""
    generator = random.Random(str(seed))
    return " ".join(generator.choice(WORDS) for _ in range(count))


def conversation(seed: object, system_words: int, *, ttl: str | None = None) -> list[Message]:
    """A long system prompt and a question; with `ttl`, the system prompt is marked."""
    part: dict[str, Any] = {"type": "text", "text": f"{seed}: {words(seed, system_words)}"}
    if ttl is not None:
        part["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return [{"role": "system", "content": [part]}, {"role": "user", "content": "What is in the document?"}]


class Chat:
    """A client of one server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S)

    def close(self) -> None:
        self._http.close()

    def ask(self, messages: list[Message], answer_tokens: int = ANSWER_TOKENS) -> Answer:
        """Stream an answer of exactly so many tokens. Raises Failed."""
        body = {
            "model": MODEL_NAME,
            "messages": messages,
            "max_tokens": answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s = time.perf_counter()
        first_s: float | None = None
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise Failed(f"chat completion: HTTP {response.status_code}: {response.read().decode()[:500]}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                first_s = first_s or time.perf_counter()
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
            headers = dict(response.headers)
        if first_s is None or not usage:
            raise Failed("chat completion: the stream ended without a token or without usage")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(pieces),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            first_token_ms=(first_s - started_s) * 1000,
            usage=usage,
            headers={name: value for name, value in headers.items() if name.startswith("x-kvpin-")},
        )

    def full_block_tokens(self, messages: list[Message]) -> int:
        """How many tokens of whole blocks the system prompt has, found without kvpin.

        Two prompts that differ only in what follows it agree on no more than its tokens.
        """
        other = json.loads(json.dumps(messages))
        other[0]["content"][0]["text"] += "#"
        one, two = (self._tokens(each) for each in (messages, other))
        common = next(index for index, (left, right) in enumerate(zip(one, two, strict=False)) if left != right)
        return common // BLOCK_TOKENS * BLOCK_TOKENS

    def prefixes(self) -> list[dict[str, Any]]:
        return list(self._json("GET", "/v1/cache/prefixes")["prefixes"])

    def master_stats(self) -> dict[str, int]:
        return dict(self._json("GET", "/v1/cache/status")["master"])

    def evict(self, messages: list[Message], mode: str) -> dict[str, Any]:
        return self._json("POST", "/v1/cache/evict", {"messages": messages, "mode": mode, "model": MODEL_NAME})

    def reset_engine_cache(self) -> None:
        """Empty the engine's own cache (not kvpin's), as far as no request uses it."""
        self._http.post("/reset_prefix_cache").raise_for_status()

    def _tokens(self, messages: list[Message]) -> list[int]:
        return list(self._json("POST", "/tokenize", {"model": MODEL_NAME, "messages": messages})["tokens"])

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = self._http.request(method, path, json=body)
        if response.status_code != 200:
            raise Failed(f"{method} {path}: HTTP {response.status_code}: {response.text[:500]}")
        return dict(response.json())

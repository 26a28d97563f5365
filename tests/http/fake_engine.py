"""An engine without a model: real Jinja templates, a real tokenizer, and a simple form of vLLM's conversions."""

import copy
from itertools import accumulate
from typing import Any

import jinja2.sandbox
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvpin.http.engine import Rendered, RenderError
from kvpin.http.places import Dialect

CHATML = (
    "{%- if tools %}<|im_start|>system\n# Tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string -%}{{ m.content }}"
    "{%- else -%}{%- for p in m.content or [] -%}{{ p.text if p.type == 'text' else '<image>' }}{%- endfor -%}"
    "{%- endif -%}{%- for c in m.tool_calls or [] -%}"
    "{{ '\n<tool_call>\n' }}{{ c.function | tojson }}{{ '\n</tool_call>' }}{%- endfor -%}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
TRIMMING = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + flat(m.content) | trim + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{{ '<|im_start|>assistant\n' }}"
)
FOLDING = (  # as Gemma: the system text begins the first user turn
    "{%- if messages[0].role == 'system' -%}{%- set first = flat(messages[0].content) + '\n\n' -%}"
    "{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for m in rest -%}{{ '<|im_start|>' + m.role + '\n' + (first if loop.first else '') + flat(m.content) | trim }}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}{{ '<|im_start|>assistant\n' }}"
)
INSISTING = (  # as Qwen 3.5: no user message, no prompt
    "{%- if not messages | selectattr('role', 'equalto', 'user') | list -%}"
    "{{ raise_exception('No user query found') }}{%- endif -%}" + CHATML
)
LAST_USER = (  # as Mistral v3: the system text stands in the last user turn
    "{%- set ns = namespace(system='') -%}"
    "{%- for m in messages if m.role == 'system' -%}"
    "{%- set ns.system = ns.system + flat(m.content) + '\n\n' -%}{%- endfor -%}"
    "{%- for m in messages if m.role != 'system' -%}"
    "{{ '<|im_start|>' + (ns.system if loop.last else '') + flat(m.content) + '<|im_end|>' }}{%- endfor -%}"
)
SHOUTING = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")  # changes a sentinel
DEAF = "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{%- endfor -%}"  # renders no content at all
TEMPLATES = {
    "chatml": CHATML, "trimming": TRIMMING, "folding": FOLDING, "insisting": INSISTING, "last_user": LAST_USER,
}  # fmt: skip

WORDS = "The quick brown fox jumps over the lazy dog. user system assistant tool parcel handbook 0123456789 é ü 漢字 🎉"


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    return tokenizer


TOKENIZER = _tokenizer()


def flat(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [])


def _raise(text: str) -> None:
    raise jinja2.TemplateError(text)


class FakeEngine:
    """Renders with one template. `renders` counts; `fails` makes it raise; `offsets` False: no offsets."""

    def __init__(self, template: str = CHATML, block_tokens: int = 16) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.globals["flat"] = flat
        self.template = environment.from_string(template)
        self.block_tokens = block_tokens
        self.protects = True
        self.offsets = True
        self.fails: Exception | None = None
        self.tokenised = 0
        self.rendered = 0

    async def render(self, dialect: Dialect, body: dict[str, Any]) -> Rendered:
        text = await self.render_text(dialect, body)
        self.tokenised += 1
        encoding = TOKENIZER.encode(text)
        ends = list(accumulate((end for _, end in encoding.offsets), max))
        return Rendered(encoding.ids, text, ends if self.offsets else None)

    async def render_text(self, dialect: Dialect, body: dict[str, Any]) -> str:
        self.rendered += 1
        if self.fails is not None:
            raise self.fails
        try:
            chat = _as_chat(body) if dialect is Dialect.ANTHROPIC else copy.deepcopy(body)
            return self.template.render(
                messages=chat["messages"], tools=chat.get("tools"), add_generation_prompt=True, tool_calls=None
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise RenderError(str(error)) from error

    def scope(self, body: dict[str, Any]) -> str:
        return f"{body.get('model')}/{body.get('cache_salt', '')}"

    def default_model(self) -> str:
        return "m"

    def error(self, dialect: Dialect, status: int, message: str) -> dict[str, Any]:
        return {"dialect": dialect, "status": status, "message": message}


def _as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's form as vLLM turns it into a chat: system blocks joined, tool results as messages of their own."""
    messages: list[dict[str, Any]] = []
    if system := body.get("system"):
        messages.append({"role": "system", "content": flat(system)})
    for message in body["messages"]:
        if isinstance(message["content"], str):
            messages.append(dict(message))
            continue
        parts, calls = [], []
        for block in message["content"]:
            match block["type"]:
                case "text":
                    parts.append(block)
                case "tool_use":
                    calls.append({"function": {"name": block["name"], "arguments": block["input"]}})
                case "tool_result":
                    inner = block["content"]
                    joined = inner if isinstance(inner, str) else "\n".join(each.get("text", "") for each in inner)
                    messages.append({"role": "tool", "content": joined})
                case "image" | "document":
                    parts.append({"type": "image"})
        if parts or calls:
            messages.append({"role": message["role"], "content": parts, "tool_calls": calls})
    tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
        for tool in body.get("tools") or []
    ]
    return {"messages": messages, "tools": tools}

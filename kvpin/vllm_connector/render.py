"""vLLM as the HTTP side sees it: requests rendered and tokenised by the very calls that serve them."""

import copy
import json
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.renderers import merge_kwargs

from kvpin.http.engine import Rendered, RenderError
from kvpin.http.places import MARKER, Dialect

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.config import KVTransferConfig, VllmConfig

CONNECTOR = "KVPinConnector"


class VllmEngine:
    """See `kvpin.http.engine.Engine`. `state` is the API server's."""

    def __init__(self, state: "State", vllm_config: "VllmConfig") -> None:
        self._state = state
        self._model = vllm_config.model_config.model
        transfer = own_transfer_config(vllm_config.kv_transfer_config)
        self.protects = transfer is not None
        self.extra_config: dict[str, Any] = dict(transfer.kv_connector_extra_config) if transfer else {}
        self.block_tokens = _chunk_tokens(vllm_config, self.extra_config)

    async def render(self, dialect: Dialect, body: dict[str, Any]) -> Rendered:
        try:
            request = await self._request(dialect, body)
            request.return_token_offsets = True
            result = await self._state.online_renderer.render_chat(request)
        except Exception as error:
            raise RenderError(str(error)) from error
        if isinstance(result, ErrorResponse):
            raise RenderError(result.error.message)
        _, (prompt,) = result
        token_ids = prompt.get("prompt_token_ids")
        if token_ids is None:
            raise RenderError("the prompt has no token ids")
        offsets = prompt.get("prompt_token_offsets")  # absent for slow tokenizers and multimodal prompts
        if offsets is None or len(offsets) != len(token_ids):
            return Rendered(token_ids, prompt.get("prompt"), None)
        # A token that stands for no text, such as BOS, is said to end at 0: it ends where the one before does.
        ends = list(accumulate((end for _, end in offsets), max))
        return Rendered(token_ids, prompt.get("prompt"), ends)

    async def render_text(self, dialect: Dialect, body: dict[str, Any]) -> str:
        # As OnlineRenderer.preprocess_chat, without tokenising. Offsets are only believed where both agree.
        try:
            request = await self._request(dialect, body)
            renderer = self._state.online_renderer
            hidden = request.tool_choice == "none" and renderer.exclude_tools_when_tool_choice_none
            tools = None if request.tools is None or hidden else [tool.model_dump() for tool in request.tools]
            params = request.build_chat_params(
                renderer.chat_template, renderer.chat_template_content_format
            ).with_defaults(merge_kwargs(renderer.default_chat_template_kwargs, {"tools": tools, "tokenize": False}))
            _, prompt = await renderer.renderer.render_messages_async(request.messages, params)
        except Exception as error:
            raise RenderError(str(error)) from error
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise RenderError("the renderer gives no text")
        return text

    def scope(self, body: dict[str, Any]) -> str:
        """Aliases of the base model share their blocks, so they share their prefixes; an adapter has its own."""
        named = body.get("model")
        base = not named or self._state.openai_serving_models.is_base_model(named)
        return json.dumps([self._model, "" if base else named, body.get("cache_salt") or ""])

    def default_model(self) -> str:
        name: str = self._state.openai_serving_models.base_model_paths[0].name
        return name

    def error(self, dialect: Dialect, status: int, message: str) -> dict[str, Any]:
        if dialect is Dialect.ANTHROPIC:
            return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
        answer: dict[str, Any] = create_error_response(message, param=MARKER).model_dump()
        return answer

    async def _request(self, dialect: Dialect, body: dict[str, Any]) -> ChatCompletionRequest:
        """The chat request that the engine makes of the body. Validation may change what it's given: hence the copy."""
        if dialect is Dialect.OPENAI:
            return ChatCompletionRequest.model_validate(copy.deepcopy(body))
        request = AnthropicMessagesRequest.model_validate(copy.deepcopy(body))
        serving = self._state.anthropic_serving_messages
        effort = "none"
        if request.thinking is not None and request.thinking.type == "disabled":
            effort = await serving._get_disabled_thinking_effort()
        return serving.to_chat_completion_request(
            request, merge_inline_system=serving._merge_inline_system, disabled_thinking_effort=effort
        )


def own_transfer_config(transfer: "KVTransferConfig | None") -> "KVTransferConfig | None":
    """The configuration of kvpin's own connector, also as one of several connectors; None if there is none."""
    if transfer is None or transfer.kv_connector == CONNECTOR:
        return transfer
    for inner in transfer.kv_connector_extra_config.get("connectors", []):
        if isinstance(inner, dict) and inner.get("kv_connector") == CONNECTOR:
            return type(transfer)(**{**inner, "engine_id": transfer.engine_id})
    return None


def _chunk_tokens(vllm_config: "VllmConfig", extra_config: dict[str, Any]) -> int:
    """How many tokens one object of the connector spans."""
    block_tokens = vllm_config.cache_config.block_size * vllm_config.parallel_config.decode_context_parallel_size
    if chunk_tokens := extra_config.get("block_size"):
        return int(chunk_tokens)
    return int(block_tokens) * int(extra_config.get("blocks_per_chunk") or 1)

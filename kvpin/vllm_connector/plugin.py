"""vLLM's entry to the HTTP side: `VLLM_PLUGINS=kvpin vllm serve ...` (entry point group `vllm.endpoint_plugins`).

It sits behind vLLM's authentication. Each API server process has its own client of the master.
"""

import logging
from argparse import Namespace
from typing import TYPE_CHECKING

from kvpin.client import Client
from kvpin.errors import ConfigError
from kvpin.http.middleware import CacheControlMiddleware
from kvpin.http.routes import routes
from kvpin.http.service import Service
from kvpin.http.settings import HttpConfig, http_config
from kvpin.http.sidefield import load_key
from kvpin.paths import run_dir
from kvpin.vllm_connector.render import CONNECTOR, VllmEngine
from kvpin.vllm_connector.settings import client_config

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

logger = logging.getLogger(__name__)


class KVPinEndpoints:
    """See vLLM's `EndpointPlugin`. The service is made when the engine is there."""

    name = "kvpin"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.service: Service | None = None

    def attach_router(self, app: "Starlette") -> None:
        app.add_middleware(CacheControlMiddleware, holder=self)
        app.router.routes.extend(routes(self))

    async def init_state(self, engine_client: "EngineClient | None", state: "State", args: Namespace) -> None:
        """Raises ConfigError."""
        if engine_client is None:
            return
        self.service = _make_service(engine_client, state, http_config())


def endpoint_plugin() -> KVPinEndpoints:
    """The entry point."""
    return KVPinEndpoints()


def _make_service(engine_client: "EngineClient", state: "State", config: HttpConfig) -> Service:
    engine = VllmEngine(state, engine_client.vllm_config)
    if not engine.protects:
        logger.warning("event=no_connector effect='markers are ignored' remedy='--kv-transfer-config: %s'", CONNECTOR)
        return Service(config, engine, None, b"")
    client = Client(config=client_config(engine.extra_config), name="vllm-http", writer=False)
    try:
        key = load_key(run_dir())
    except ConfigError as error:
        logger.warning("event=no_side_field_key effect='marked prefixes are not protected' error='%s'", error)
        engine.protects = False
        key = b""
    logger.info("event=http_ready block_tokens=%d strict=%s", engine.block_tokens, config.strict)
    return Service(config, engine, client, key)

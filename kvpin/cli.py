"""The command line: run a master, look into it, and end or lengthen what it promises."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvpin import __version__, cli_inspect, cli_prefixes
from kvpin.cli_output import Exit, exit_code, out, show_error, show_json, show_table, table
from kvpin.config import MasterConfig, load_master_config, valid_values
from kvpin.errors import KvpinError

app = typer.Typer(
    help="Guaranteed prefix caching for self-hosted LLM engines: run a master, see and steer what it protects.\n\n"
    "Exit codes: 0 done, 1 failed (or `check` found something), 2 wrong usage or settings, 3 another master owns the "
    "pool, 4 no master answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cli_inspect.register(app)
cli_prefixes.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. Every KvpinError becomes a line on stderr and an exit code."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="kvpin")
    except KvpinError as error:
        show_error(str(error))
        sys.exit(exit_code(error))


def _show_version(wanted: bool) -> None:
    if wanted:
        out.print(__version__)
        raise typer.Exit(Exit.OK)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _option(text: str, metavar: str | None = None) -> Any:
    return typer.Option(help=text, metavar=metavar, show_default=False)


Config = Annotated[str | None, _option("TOML file with settings; also $KVPIN_CONFIG.", "PATH")]
Pool = Annotated[str | None, _option("Name of the pool: one master each. Default: default.", "NAME")]
Listen = Annotated[str | None, _option("ZeroMQ address. Default: ipc://<run dir>/<pool>.sock.", "ADDRESS")]
InsecureTcp = Annotated[bool | None, _option("Allow tcp:// beyond loopback: unencrypted, unauthenticated.")]
PoolSize = Annotated[
    str | None, _option('Such as "16GiB". Default: a quarter of what is free in the segment dir.', "SIZE")
]
Limit = Annotated[str | None, _option('What windows may hold, such as "8GiB" or "40%". Default: 50%.', "SIZE|PERCENT")]
HighMark = Annotated[float | None, _option("Share of the pool above which eviction begins. Default: 0.95.", "FRACTION")]
LowMark = Annotated[float | None, _option("Share of the pool below which eviction ends. Default: 0.9.", "FRACTION")]
Headroom = Annotated[
    float | None, _option("Guarantees stay this far below the high watermark. Default: 0.05.", "FRACTION")
]
CacheQuotas = Annotated[str | None, _option("Guaranteed bytes by cache, such as kv=4GiB.", "CACHE=SIZE,...")]
TenantQuotas = Annotated[str | None, _option("Guaranteed bytes by tenant.", "TENANT=SIZE,...")]
PutTimeout = Annotated[int | None, _option("From put_start to put_end. Default: 30000.", "MS")]
Quarantine = Annotated[int | None, _option("Before a lost put's range is used again. Default: 600000.", "MS")]
LeaseMax = Annotated[int | None, _option("Longest lease. Default: 60000.", "MS")]
TtlMax = Annotated[int | None, _option("Longest guaranteed window. Default: 86400000.", "MS")]
SessionTimeout = Annotated[int | None, _option("A client silent so long is taken for gone. Default: 15000.", "MS")]
ExitWhenIdle = Annotated[
    float | None, _option("Leave after so long without clients; 0 = never. Default: 0.", "SECONDS")
]
SegmentDir = Annotated[str | None, _option("A tmpfs for the pool. Default: /dev/shm.", "PATH")]
LogLevel = Annotated[str | None, _option("debug, info, warning or error. Default: info.", "LEVEL")]
LogFormat = Annotated[str | None, _option("kv or json. Default: kv.", "FORMAT")]


@app.command()
def master(
    config: Config = None,
    pool: Pool = None,
    listen: Listen = None,
    insecure_tcp: InsecureTcp = None,
    pool_size: PoolSize = None,
    guaranteed_limit: Limit = None,
    high_watermark: HighMark = None,
    low_watermark: LowMark = None,
    headroom: Headroom = None,
    cache_quotas: CacheQuotas = None,
    tenant_quotas: TenantQuotas = None,
    put_timeout_ms: PutTimeout = None,
    quarantine_ms: Quarantine = None,
    lease_ms_max: LeaseMax = None,
    ttl_ms_max: TtlMax = None,
    session_timeout_ms: SessionTimeout = None,
    exit_when_idle_s: ExitWhenIdle = None,
    segment_dir: SegmentDir = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run a master in the foreground until SIGTERM or SIGINT.

    Settings: defaults < TOML file < KVPIN_* environment < these options. `kvpin config` shows what results.

    \b
    Examples:
      kvpin master --pool-size 16GiB --guaranteed-limit 8GiB
      kvpin master --config kvpin.toml --log-format json
    """
    given = dict(locals())
    toml_path = given.pop("config")
    loaded = load_master_config(given, toml_path=toml_path)
    from kvpin import log
    from kvpin.master import launch  # lazily: the other commands need no server

    log.configure(loaded.config.log_level, loaded.config.log_format)
    launch.run(loaded)


@app.command("config")
def show_config(
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Show every setting of a master started here now, where its value comes from, and what it may be.

    \b
    Examples:
      KVPIN_POOL_SIZE=8GiB kvpin config --config kvpin.toml
    """
    loaded = load_master_config(toml_path=config)
    settings = {
        name: {"value": getattr(loaded.config, name), "origin": origin, "valid": valid_values(MasterConfig, name)}
        for name, origin in loaded.origins.items()
    }
    if as_json:
        show_json(settings)
        return
    shown = table("setting", "value", "origin", "valid values")
    for name, setting in settings.items():
        shown.add_row(name, escape(repr(setting["value"])), escape(setting["origin"]), escape(setting["valid"]))
    show_table(shown)

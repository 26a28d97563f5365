"""Settings: four sources, one winner, and errors that name the key, where it came from, and what would be right."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvpin.config import (
    ClientConfig,
    MasterConfig,
    client_config,
    default_address,
    load_master_config,
    pool_address,
    run_dir,
    valid_values,
)
from kvpin.errors import ConfigError
from kvpin.master import sizing
from kvpin.master.sizing import core_config, pool_bytes
from kvpin.sizes import parse_share, parse_size

GIB, MIB = 1 << 30, 1 << 20


# --- sources --------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    loaded = load_master_config({}, {})
    assert loaded.config == MasterConfig()
    assert set(loaded.origins) == set(MasterConfig.__struct_fields__)
    assert set(loaded.origins.values()) == {"default"}


def test_each_source_beats_the_ones_before(tmp_path: Path) -> None:
    toml = tmp_path / "kvpin.toml"
    toml.write_text("put_timeout_ms = 1\nquarantine_ms = 1\nlease_ms_max = 1\n")
    env = {"KVPIN_QUARANTINE_MS": "2", "KVPIN_LEASE_MS_MAX": "2"}
    loaded = load_master_config({"lease_ms_max": 3, "pool": None}, env, str(toml))
    config, origins = loaded.config, loaded.origins
    assert (config.put_timeout_ms, config.quarantine_ms, config.lease_ms_max) == (1, 2, 3)
    assert origins["put_timeout_ms"] == str(toml)
    assert origins["quarantine_ms"] == "$KVPIN_QUARANTINE_MS"
    assert origins["lease_ms_max"] == "--lease-ms-max"
    assert origins["pool"] == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    toml = tmp_path / "kvpin.toml"
    toml.write_text('pool = "other"\n')
    assert load_master_config({}, {"KVPIN_CONFIG": str(toml)}).config.pool == "other"


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("KVPIN_INSECURE_TCP", "true", "insecure_tcp", True),
        ("KVPIN_HIGH_WATERMARK", "0.8", "high_watermark", 0.8),
        ("KVPIN_EXIT_WHEN_IDLE_S", "30", "exit_when_idle_s", 30.0),
        ("KVPIN_POOL_SIZE", "4GiB", "pool_size", "4GiB"),
        ("KVPIN_POOL_SIZE", "4294967296", "pool_size", "4294967296"),
        ("KVPIN_CACHE_QUOTAS", "kv=1GiB,responses=10%", "cache_quotas", {"kv": "1GiB", "responses": "10%"}),
        ("KVPIN_LOG_FORMAT", "json", "log_format", "json"),
    ],
)
def test_environment_strings_are_converted(variable: str, text: str, field: str, value: object) -> None:
    assert getattr(load_master_config({}, {variable: text}).config, field) == value


def test_toml_values(tmp_path: Path) -> None:
    toml = tmp_path / "kvpin.toml"
    toml.write_text("pool_size = 1073741824\n[cache_quotas]\nkv = 1048576\n[tenant_quotas]\nacme = '5%'\n")
    loaded = load_master_config({}, {}, str(toml))
    assert pool_bytes(loaded) == GIB
    assert core_config(loaded).tenant_quotas == {"acme": GIB // 20}
    config = loaded.config
    assert config.cache_quotas == {"kv": "1048576"}
    assert config.tenant_quotas == {"acme": "5%"}


# --- wrong keys and values ------------------------------------------------------------------------------------------

WRONG_OPTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"pool_siez": "4GiB"}, ["pool_siez", "pool_size"]),
    ({"completely_else": 1}, ["completely_else", "put_timeout_ms"]),
    ({"put_timeout_ms": "soon"}, ["--put-timeout-ms", "put_timeout_ms", "soon", "int"]),
    ({"put_timeout_ms": 0}, ["--put-timeout-ms", "put_timeout_ms", "0", "1"]),
    ({"lease_ms_max": 10**9}, ["--lease-ms-max", "lease_ms_max", "60000"]),
    ({"ttl_ms_max": -1}, ["--ttl-ms-max", "ttl_ms_max"]),
    ({"session_timeout_ms": 0}, ["--session-timeout-ms", "session_timeout_ms"]),
    ({"exit_when_idle_s": -1}, ["--exit-when-idle-s", "exit_when_idle_s"]),
    ({"high_watermark": "nan"}, ["--high-watermark", "high_watermark", "nan"]),
    ({"high_watermark": 1.5}, ["--high-watermark", "high_watermark", "1.5"]),
    ({"low_watermark": 0.99}, ["low_watermark", "0.99", "high_watermark"]),
    ({"headroom": 0.97}, ["headroom", "0.97"]),
    ({"log_level": "loud"}, ["--log-level", "log_level", "loud", "warning"]),
    ({"log_format": "xml"}, ["--log-format", "log_format", "xml", "json"]),
    ({"insecure_tcp": "perhaps"}, ["--insecure-tcp", "insecure_tcp", "perhaps"]),
    ({"pool": ""}, ["--pool", "letters"]),
    ({"pool": "a/b"}, ["--pool", "a/b", "letters"]),
    ({"pool": "../up"}, ["--pool", "letters"]),
    ({"pool": "x" * 300}, ["--pool", "40"]),
    ({"pool_size": "lots"}, ["--pool-size", "pool_size", "lots", "512MiB"]),
    ({"pool_size": "4QB"}, ["--pool-size", "pool_size", "4QB"]),
    ({"pool_size": "-4GiB"}, ["--pool-size", "pool_size", "-4GiB"]),
    ({"pool_size": "1KiB"}, ["--pool-size", "pool_size", "1KiB", "at least"]),
    ({"guaranteed_limit": "150%"}, ["--guaranteed-limit", "guaranteed_limit", "150%", "100%"]),
    ({"guaranteed_limit": "x%"}, ["--guaranteed-limit", "guaranteed_limit", "x%"]),
    ({"guaranteed_limit": "95%", "pool_size": "1GiB"}, ["guaranteed_limit", "--guaranteed-limit", "95%", "headroom"]),
    ({"guaranteed_limit": "2GiB", "pool_size": "1GiB"}, ["guaranteed_limit", "--guaranteed-limit", "2GiB", "headroom"]),
    ({"cache_quotas": {"kv": "many"}}, ["cache_quotas", "kv", "many"]),
    ({"cache_quotas": "kv"}, ["--cache-quotas", "cache_quotas", "kv"]),
    ({"listen": "udp://1.2.3.4:5"}, ["--listen", "listen", "udp://1.2.3.4:5", "ipc://"]),
    ({"listen": "tcp://0.0.0.0:5555"}, ["--listen", "listen", "encrypt", "insecure_tcp", "127.0.0.1"]),
    ({"listen": "tcp://*:5555"}, ["--listen", "listen", "insecure_tcp"]),
    ({"listen": "tcp://127.evil.example:5555"}, ["--listen", "listen", "insecure_tcp"]),
    ({"segment_dir": "/nowhere"}, ["--segment-dir", "segment_dir", "/nowhere"]),
]


@pytest.mark.parametrize(("options", "named"), WRONG_OPTIONS, ids=lambda x: "-".join(map(str, x))[:60])
def test_wrong_options_get_a_clear_error(options: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        core_config(load_master_config(options, {}))
    text = str(caught.value)
    assert [word for word in named if word not in text] == [], text


def test_errors_name_the_environment_variable() -> None:
    with pytest.raises(ConfigError, match=r"\$KVPIN_PUT_TIMEOUT_MS.*soon"):
        load_master_config({}, {"KVPIN_PUT_TIMEOUT_MS": "soon"})


def test_errors_name_the_file(tmp_path: Path) -> None:
    toml = tmp_path / "kvpin.toml"
    for text, reason in {
        "pool_sise = '1GiB'": "pool_sise.*did you mean 'pool_size'",
        "put_timeout_ms = 'x'": "put_timeout_ms",
        "put_timeout_ms = ": "not valid TOML",
        "[pool]\nsize = 3": "pool",
    }.items():
        toml.write_text(text)
        with pytest.raises(ConfigError, match=f"(?s){toml}.*{reason}"):
            load_master_config({}, {}, str(toml))


def test_an_absent_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/kvpin.toml: No such file"):
        load_master_config({}, {}, "/nowhere/kvpin.toml")


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:5555", "tcp://[::1]:5555", "tcp://localhost:*", "ipc:///tmp/x/y"])
def test_addresses_on_this_host_need_no_flag(listen: str) -> None:
    assert load_master_config({"listen": listen}, {}).config.listen == listen


def test_addresses_beyond_this_host_need_one() -> None:
    options = {"listen": "tcp://10.0.0.1:5555", "insecure_tcp": True}
    assert load_master_config(options, {}).config.listen == "tcp://10.0.0.1:5555"


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1", 1), ("512MiB", 512 * MIB), ("4GiB", 4 * GIB), ("4GB", 4 * 10**9), ("1.5GiB", 3 * GIB // 2), ("2 KiB", 2048)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text, "size") == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1e9999", "nan", "inf", "-1", "1 2", "0x10", "1GiBB", "9999999999TiB"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="that_size"):
        parse_size(text, "that_size")


def test_shares() -> None:
    assert parse_share("50%", 1000, "x") == 500
    assert parse_share("12.5 %", 1000, "x") == 125
    assert parse_share("0.5", 1000, "x") == 500
    assert parse_share("300", 1000, "x") == 300
    assert parse_share("3MiB", 1000, "x") == 3 * MIB


@pytest.mark.parametrize(
    ("free_bytes", "available", "pool_size_bytes"),
    [
        (8 * GIB, 32 * GIB, 2 * GIB),
        (8 * GIB, None, 2 * GIB),
        (8 * GIB, GIB, GIB // 4),  # the control group's limit, which /dev/shm doesn't show
        (1 << 50, None, sizing.POOL_BYTES_AUTO_MAX),
    ],
)
def test_auto_pool_is_a_quarter_of_what_can_be_had(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, available: int | None, pool_size_bytes: int
) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda directory: free_bytes)
    monkeypatch.setattr(sizing, "available_bytes", lambda: available)
    assert pool_bytes(load_master_config({}, {})) == pool_size_bytes


def test_auto_pool_in_dockers_default_shm_says_how_to_raise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda directory: 62 * MIB)
    with pytest.raises(ConfigError, match=r"default: pool_size = 'auto': /dev/shm can hold .* \(62 MiB\).*--shm-size"):
        pool_bytes(load_master_config({}, {}))


def test_pools_are_whole_pages() -> None:
    assert pool_bytes(load_master_config({"pool_size": "100000001"}, {})) == 100000001 // 4096 * 4096


def test_every_setting_says_what_it_may_be() -> None:
    for config in (MasterConfig, ClientConfig):
        for name in config.__struct_fields__:
            assert valid_values(config, name) != "text", name
    assert valid_values(MasterConfig, "lease_ms_max") == "1 to 60000 ms"
    assert valid_values(MasterConfig, "log_format") == "json or kv"


# --- the client -----------------------------------------------------------------------------------------------------


def test_client_settings() -> None:
    env = {"KVPIN_ADDRESS": "ipc:///a", "KVPIN_CALL_TIMEOUT_MS": "5", "KVPIN_EMBEDDED": "false", "KVPIN_LISTEN": "x"}
    config = client_config({"call_timeout_ms": 7}, env)
    assert config == ClientConfig(address="ipc:///a", call_timeout_ms=7, embedded=False)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"adress": "x"}, ["adress", "did you mean 'address'"]),
        ({"address": "localhost:5555"}, ["address", "localhost:5555", "tcp://host:port"]),
        ({"address": "ipc://relative"}, ["address", "relative", "absolute"]),
        ({"address": "ipc:///" + "x" * 200}, ["address", "107 bytes"]),
        ({"pool": "../x"}, ["pool", "../x", "letters"]),
        ({"lease_ms": 0}, ["lease_ms", "1 to 60000 ms"]),
        ({"zzz": 1}, ["zzz", "known:", "call_timeout_ms", "address", "embedded"]),
        ({"call_timeout_ms": "soon"}, ["call_timeout_ms", "soon", "int"]),
        ({"embedded": "maybe"}, ["embedded", "maybe", "bool"]),
    ],
)
def test_wrong_client_settings(overrides: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        client_config(overrides, {})
    assert [word for word in named if word not in str(caught.value)] == [], str(caught.value)


def test_a_wrong_client_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\$KVPIN_LEASE_MS.*long"):
        client_config({}, {"KVPIN_LEASE_MS": "long"})


# --- run directory --------------------------------------------------------------------------------------------------


def test_run_dir_is_made_private(tmp_path: Path) -> None:
    path = run_dir({"KVPIN_RUN_DIR": str(tmp_path / "a" / "b")})
    assert path == tmp_path / "a" / "b"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_run_dir_sources(tmp_path: Path) -> None:
    assert run_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "kvpin"
    assert run_dir({"XDG_RUNTIME_DIR": "/nowhere/1000"}) == Path(f"/tmp/kvpin-{os.geteuid()}")
    assert run_dir({"XDG_RUNTIME_DIR": str(tmp_path), "KVPIN_RUN_DIR": str(tmp_path / "x")}) == tmp_path / "x"
    assert default_address({"KVPIN_RUN_DIR": str(tmp_path / "x")}) == f"ipc://{tmp_path}/x/default.sock"


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_run_dir_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 700 {path}"):
        run_dir({"KVPIN_RUN_DIR": str(path)})


def test_run_dir_of_somebody_else_or_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    with pytest.raises(ConfigError, match="must be a directory of yours"):
        run_dir({"KVPIN_RUN_DIR": str(link)})
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="must be a directory of yours"):
        run_dir({"KVPIN_RUN_DIR": str(real)})


def test_run_dir_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="KVPIN_RUN_DIR"):
        run_dir({"KVPIN_RUN_DIR": str(file / "dir")})


def test_socket_paths_are_bounded(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    with pytest.raises(ConfigError, match="longer than 107 bytes: set KVPIN_RUN_DIR"):
        pool_address("p", {"KVPIN_RUN_DIR": str(long)})

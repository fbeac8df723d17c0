"""YAML into frozen structs: every mistake is a ConfigError that says where, what, and what would be right."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from weightsync.config import Config, EngineConfig, EnvConfig, RenameConfig, load_config
from weightsync.errors import ConfigError

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("sgl_*.yaml"))
PAIR = {"pair": "sgl_dtensor_v2"}


def refused(**keys) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(PAIR | keys)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_the_configurations_that_we_ship_are_valid_and_named_after_their_pair(path):
    assert load_config(path).pair == path.stem


def test_the_shipped_configuration_shows_the_defaults():
    assert load_config(CONFIGS[0].parent / "sgl_dtensor_v2.yaml") == Config(pair="sgl_dtensor_v2")


def test_everything_that_yaml_can_say_arrives(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text(
        "pair: sgl_megatron\nroute: bucket\nverify: none\npause: in_place\non_flush_refused: wait\n"
        "on_engine_failure: exclude\nbucket_bytes: 1024\narena_bytes: 5\ntimeout_s: 3\nconnect_timeout_s: 0.5\n"
        "engines:\n- url: http://h:1\n- {url: 'https://h:2', api_key: k}\npublishers: ['tcp://h:1#t']\n"
        "rename: [{pattern: '^model', to: language}]\nconstants: [inv_freq$]\nleave_out: [^vision]\nbind_host: '::'\n"
        "envs: {sgl_megatron: {python: /p, pythonpath: [/a], env: {K: v}}}\n"
    )
    assert (
        load_config(path)
        == load_config(str(path))
        == Config(
            pair="sgl_megatron",
            route="bucket",
            verify="none",
            pause="in_place",
            on_flush_refused="wait",
            on_engine_failure="exclude",
            bucket_bytes=1024,
            arena_bytes=5,
            timeout_s=3.0,
            connect_timeout_s=0.5,
            engines=[EngineConfig("http://h:1"), EngineConfig("https://h:2", "k")],
            publishers=["tcp://h:1#t"],
            rename=[RenameConfig("^model", "language")],
            constants=["inv_freq$"],
            leave_out=["^vision"],
            bind_host="::",
            envs={"sgl_megatron": EnvConfig("/p", ["/a"], {"K": "v"})},
        )
    )


# -------------------------------------------------------------------------------------------------------- unknown keys


@pytest.mark.parametrize(
    ("keys", "named", "nearest"),
    [
        ({"bucket_byte": 1}, "bucket_byte", "bucket_bytes"),
        ({"timeout": 1}, "timeout", "timeout_s"),
        ({"on_failure": "raise"}, "on_failure", "on_engine_failure"),
        ({"engines": [{"url": "http://h:1"}, {"ur": "http://h:2"}]}, "engines[1].ur", "url"),
        ({"rename": [{"patern": "a", "to": "b"}]}, "rename[0].patern", "pattern"),
        ({"envs": {"sgl_dtensor_v2": {"pyton": "x"}}}, "envs.sgl_dtensor_v2.pyton", "python"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(keys, named, nearest):
    assert f"unknown key {named}; did you mean {nearest!r}?" in refused(**keys)


def test_a_key_like_no_other_lists_the_valid_ones():
    message = refused(zzz=1)
    assert "unknown key zzz; valid keys: pair, engines" in message
    with pytest.raises(ConfigError, match="unknown key True"):
        load_config({**PAIR, True: 1})


# -------------------------------------------------------------------------------------------------------- wrong values


@pytest.mark.parametrize("name", ["bucket_bytes", "timeout_s", "connect_timeout_s"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_that_are_not_positive_are_shown(name, value):
    assert f"{name} must be positive, got {value}" in refused(**{name: value})
    with pytest.raises(ConfigError, match=f"{name} must be positive"):
        Config(pair="sgl_dtensor_v2", **{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_time_that_is_no_time_is_refused(value):
    assert f"timeout_s must be positive, got {value}" in refused(timeout_s=value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"arena_bytes": -1}, ["arena_bytes", "-1"]),
        ({"bucket_bytes": "512M"}, ["bucket_bytes", "512M"]),
        ({"bucket_bytes": True}, ["bucket_bytes", "True"]),
        ({"route": "rdma"}, ["route", "rdma"]),
        ({"pause": False}, ["pause", "False"]),
        ({"pair": "vllm"}, ["pair", "vllm"]),
        ({"engines": [{"url": 3}]}, ["engines[0].url", "3"]),
        ({"engines": {"url": "http://h:1"}}, ["engines"]),
        ({"engines": ["http://h:1"]}, ["engines[0]", "http://h:1"]),
        ({"engines": [{}]}, ["url", "engines[0]"]),
        ({"engines": [{"url": "h:1"}]}, ["http://HOST:PORT", "'h:1'"]),
        ({"engines": [{"url": "http://h:1"}, {"url": "http://h:1/"}]}, ["engine named twice", "http://h:1"]),
        ({"publishers": ["tcp://h:1#a", "tcp://h:1#b"]}, ["publisher named twice", "tcp://h:1"]),
        ({"rename": [{"pattern": "(", "to": ""}]}, ["not a regular expression", "'('"]),
        ({"constants": ["*"]}, ["not a regular expression", "'*'"]),
        ({"leave_out": ["["]}, ["not a regular expression", "'['"]),
        ({"envs": {"x": {"pythonpath": "/a:/b"}}}, ["pythonpath"]),
        ({"envs": {"x": {"env": {"A": 1}}}}, ["env"]),
        ({"envs": []}, ["envs"]),
    ],
)
def test_a_wrong_value_is_named_with_its_key(keys, words):
    message = refused(**keys)
    for word in words:
        assert word in message, message


def test_pair_is_required():
    with pytest.raises(ConfigError, match="pair"):
        load_config({})


def test_a_struct_is_checked_like_a_file():
    with pytest.raises(ConfigError, match=r"route.*rdma"):
        load_config(Config(pair="sgl_dtensor_v2", route="rdma"))
    config = Config(pair="sgl_dtensor_v2", engines=[EngineConfig("http://h:1", "k")])
    assert load_config(config) == config


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "expected a mapping of keys, got NoneType"),
        (b"- a\n- b\n", "expected a mapping of keys, got list"),
        (b"just words\n", "expected a mapping of keys, got str"),
        (b"pair: [unclosed\n", "is not valid YAML"),
        (b"pair: \xff\xfe\x00\n", "is not valid YAML"),
        (b"? [a, b]\n: c\n", "is not valid YAML"),
        (b"pair: !!python/object/apply:os.system ['true']\n", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, text, words):
    path = tmp_path / "broken.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read configuration .*absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


# ------------------------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "engine",
    [
        {"url": "http://h:1", "api_key": "hush", "extra": 1},
        {"url": 3, "api_key": "hush"},
        {"api_key": "hush"},
        {"url": "http://h:1", "api_key": ["hush"]},
        {"url": "h:1", "api_key": "hush"},
    ],
)
def test_no_message_shows_a_key(engine):
    assert "hush" not in refused(engines=[engine])
    assert "hush" not in refused(engines=engine)


def test_no_message_shows_a_publishers_token():
    assert "hush" not in refused(publishers=["tcp://h:1#hush", "tcp://h:1#hush"])


def test_printing_a_configuration_shows_no_key():
    config = load_config(PAIR | {"engines": [{"url": "http://h:1", "api_key": "hush"}]})
    assert "hush" not in f"{config} {config!r} {config.engines}"
    assert config.engines[0].api_key == "hush"


def test_it_is_frozen_and_crosses_the_wire():
    config = load_config(PAIR | {"engines": [{"url": "http://h:1"}]})
    with pytest.raises(AttributeError):
        config.timeout_s = 1.0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config

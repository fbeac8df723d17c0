"""Where actor and node actors go under Ray."""

from __future__ import annotations

import pytest

from weightsync.config import NodeActorConfig, PlacementConfig, load_config
from weightsync.errors import ConfigError
from weightsync.placing import options, place, with_addresses

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def config(*hosts: str, **settings):
    publishers = [f"tcp://{host}:{5000 + number}#token" for number, host in enumerate(hosts)]
    return load_config({"pair": "sgl_dtensor_v2", "publishers": publishers, "bind_host": "0.0.0.0"} | settings)


def test_on_one_node_nothing_is_said():
    placed = place(config("127.0.0.1", "127.0.0.1"), [A])
    assert placed.actor == PlacementConfig() and not placed.at_driver and not placed.node_actors


def test_in_a_cluster_the_actor_goes_to_the_first_training_rank():
    placed = place(config(B, B), [A, B])
    assert placed.actor.resources == {f"node:{B}": 0.001} and not placed.at_driver and not placed.node_actors


def test_publishers_at_loopback_addresses_are_on_the_drivers_node():
    placed = place(config("127.0.0.1"), [A, B])
    assert placed.at_driver and placed.actor == PlacementConfig()


def test_route_nccl_gets_a_node_actor_for_every_other_node_once():
    placed = place(config(A, A, B, B, C, route="nccl"), [A, B, C])
    assert placed.actor.resources == {f"node:{A}": 0.001}
    assert [one.resources for one in placed.node_actors] == [{f"node:{B}": 0.001}, {f"node:{C}": 0.001}]


@pytest.mark.parametrize("settings", [{}, {"route": "nccl", "source": "nccl"}])
def test_other_routes_and_sources_get_none(settings):
    assert not place(config(A, B, **settings), [A, B]).node_actors


def test_what_is_configured_is_taken_as_it_is():
    given = {"placement": {"labels": {"part": "trainers"}}, "node_actors": [{"resources": {"b": 1.0}, "host": "b"}]}
    placed = place(config(A, B, route="nccl", **given), [A, B])
    assert placed.actor.labels == {"part": "trainers"}
    assert placed.node_actors == [NodeActorConfig(resources={"b": 1.0}, host="b")]


def test_an_actor_that_receives_shards_goes_where_ray_likes():
    placed = place(config(A, B, source="nccl"), [A, B, C])
    assert placed.actor == PlacementConfig() and not placed.at_driver


def test_a_loopback_bind_host_cannot_serve_other_nodes():
    with pytest.raises(ConfigError, match=r"bind_host 127\.0\.0\.1 is reached by this machine alone"):
        place(config(A, B, route="nccl", bind_host="127.0.0.1"), [A, B])


def test_ipv6_addresses_lose_their_brackets():
    placed = place(config("[fd00::1]", "[fd00::2]", route="nccl", bind_host="::"), ["fd00::1", "fd00::2"])
    assert placed.actor.resources == {"node:fd00::1": 0.001}
    assert placed.node_actors[0].resources == {"node:fd00::2": 0.001}


def test_options_of_ray():
    assert options({}, {}) == {"num_cpus": 0}
    assert options({"a": 0.5}, {"part": "x"}) == {
        "num_cpus": 0,
        "resources": {"a": 0.5},
        "label_selector": {"part": "x"},
    }


def test_addresses_go_to_those_that_had_none():
    given = [NodeActorConfig(address="tcp://b:1#t"), NodeActorConfig(resources={"c": 1.0})]
    made = with_addresses(config(A), given, ["tcp://c:2#t"])
    assert [one.address for one in made.node_actors] == ["tcp://b:1#t", "tcp://c:2#t"]


def test_a_node_actors_token_is_not_shown():
    assert "secret" not in repr(NodeActorConfig(address="tcp://b:1#secret"))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"placement": {"labels": {}, "resource": {}}}, r"unknown key placement\.resource; did you mean 'resources'"),
        ({"node_actors": [{"adress": "x"}]}, r"unknown key node_actors\[0\]\.adress; did you mean 'address'"),
        ({"source": "copied"}, r"source"),
    ],
)
def test_misspelt_keys_are_named(bad, words):
    with pytest.raises(ConfigError, match=words):
        config(A, **bad)

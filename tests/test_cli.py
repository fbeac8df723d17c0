"""The command line against a served session: what a user sees of a plan, a push and a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from tests.test_session import World, assert_serves, engine
from weightsync.cli import app
from weightsync.rpc import Server


@pytest.fixture
def served() -> Iterator[tuple[World, str]]:
    world = World(engine(2))
    server = Server(world.session)
    yield world, server.address
    server.close()
    world.close()


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.output


def test_plan_prints_what_a_push_would_move_and_moves_nothing(served):
    world, address = served
    status, text = run("plan", "--connect", address)
    assert status == 0
    assert "route shm" in text and world.engines[0].url in text
    assert all(parameter.eq(-1).all() for model in world.engines[0].models for parameter in model.parameters())


@pytest.mark.parametrize("links", [1, 3])
def test_a_made_up_cluster_is_costed_with_as_many_links_as_one_asks_for(tmp_path, links):
    (tmp_path / "cluster.yaml").write_text("{gpus: [8], models: [{name: 8B, num_bytes: 16000000000, tp: 1}]}")
    status, text = run("plan", "--topology", str(tmp_path / "cluster.yaml"), "--links", str(links))
    rows = [line for line in text.splitlines() if " ms " in line]
    assert status == 0 and len(rows) == 3
    assert all(row.count(" GB") == links for row in rows), text


@pytest.mark.parametrize("beside", [["c.yaml"], ["--publishers", "p.txt"], ["--connect", "tcp://127.0.0.1:1"]])
def test_a_made_up_cluster_and_a_real_one_do_not_go_together(tmp_path, beside):
    (tmp_path / "cluster.yaml").write_text("{gpus: [8], models: [{name: 8B, num_bytes: 16000000000, tp: 1}]}")
    status, text = run("plan", *beside, "--topology", str(tmp_path / "cluster.yaml"))
    assert status == 1 and "--topology describes a made-up cluster" in text


def test_push_prints_its_report_as_json(served):
    world, address = served
    world.train(3)
    status, text = run("push", "3", "--connect", address)
    report = json.loads(text)
    assert (status, report["weight_version"], report["verified"]) == (0, "3", True)
    assert_serves(world.engines[0], world.tensors, 3)


def test_an_error_is_one_line_and_status_1(served):
    world, address = served
    world.train(1)
    assert run("push", "1", "--connect", address)[0] == 0
    status, text = run("push", "1", "--connect", address)
    assert status == 1 and text.startswith("StaleVersion: ") and len(text.splitlines()) == 1


def test_without_an_address_or_a_configuration_it_says_what_to_give():
    status, text = run("push", "1")
    assert status == 1 and "--connect" in text


def test_a_file_that_is_not_there_is_named_in_one_line(tmp_path):
    (tmp_path / "config.yaml").write_text("pair: sgl_dtensor_v2\nengines: [{url: 'http://127.0.0.1:1'}]\n")
    status, text = run("plan", str(tmp_path / "config.yaml"), "--publishers", str(tmp_path / "gone"))
    assert status == 1
    assert "gone: No such file or directory" in " ".join(text.split()) and "Traceback" not in text


@pytest.mark.parametrize(("given", "missing"), [("engines: []", "no engines"), ("publishers: []", "no publishers")])
def test_nothing_is_started_without_both_sides(tmp_path, given, missing):
    both = {"engines": "engines: [{url: 'http://127.0.0.1:1'}]", "publishers": "publishers: ['tcp://127.0.0.1:1#a']"}
    both[given.partition(":")[0]] = given
    (tmp_path / "config.yaml").write_text("\n".join(["pair: sgl_dtensor_v2", *both.values()]))
    status, text = run("plan", str(tmp_path / "config.yaml"))
    assert (status, missing in text) == (1, True), text

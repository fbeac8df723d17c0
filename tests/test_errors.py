"""The error tree: what it says at the top of its file is what there is, and errors survive every way they travel."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

import weightsync
from weightsync import errors
from weightsync.errors import WeightSyncError, error_from_wire

KINDS = [getattr(errors, name) for name in errors.__all__ if name != "error_from_wire"]
FIELDS = {
    "engine": "http://e:1",
    "rank": 0,
    "tensor": "model.norm.weight",
    "phase": "verify",
    "safe_to_retry": True,
    "report": [{"url": "http://e:1", "state": "fenced", "seconds": {"move": 0.5}}],
}


def everything_of(error: WeightSyncError) -> dict:
    return {"type": type(error), "message": error.message} | {name: getattr(error, name) for name in FIELDS}


def test_all_is_what_there_is():
    there = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, WeightSyncError)}
    assert there | {"error_from_wire"} == set(errors.__all__)


def test_the_drawing_names_every_error_under_its_parent():
    indent = {}
    for line in errors.__doc__.splitlines():
        name = line.lstrip("│├└─ ").split(" ")[0]
        if name in errors.__all__:
            indent[name] = len(line) - len(line.lstrip("│├└─ "))
    assert set(indent) == {kind.__name__ for kind in KINDS}
    parents: list[str] = []
    for name, depth in indent.items():
        parents[depth // 4 :] = [name]
        if len(parents) > 1:
            assert getattr(errors, name).__bases__[0].__name__ == parents[-2]


def test_the_package_offers_them_all():
    for kind in KINDS:
        assert getattr(weightsync, kind.__name__) is kind


def test_a_configuration_error_is_also_a_value_error():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.TransferTimeout, errors.TransferError)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_survives_wire_pickle_and_copy(kind):
    error = kind("what went wrong", **FIELDS)
    over_the_wire = error_from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(error.to_wire())))
    for arrived in (over_the_wire, pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert everything_of(arrived) == everything_of(error)
        assert str(arrived) == str(error)


def test_notes_and_other_attributes_do_not_break_the_trip():
    error = errors.TransferError("no")
    error.add_note("a debugger's or test runner's note")
    error.extra = object()
    assert everything_of(pickle.loads(pickle.dumps(error))) == everything_of(error)
    assert set(error.to_wire()) == {"type", "message", *FIELDS}


def test_from_a_newer_peer():
    error = error_from_wire({"type": "QuotaError", "message": "full", "engine": "e", "new_field": 1})
    assert type(error) is WeightSyncError
    assert (error.message, error.engine, error.rank) == ("full", "e", None)


@pytest.mark.parametrize("name", ["annotations", "error_from_wire", "__builtins__", "_FIELDS", ""])
def test_no_other_name_of_the_module_is_called(name):
    assert type(error_from_wire({"type": name, "message": "m"})) is WeightSyncError


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "no"),
        ({"engine": "http://e"}, "[engine http://e] no"),
        ({"rank": 0}, "[rank 0] no"),
        ({"engine": "http://e", "rank": 2, "phase": "move"}, "[engine http://e, rank 2, phase move] no"),
    ],
)
def test_the_text_says_where(fields, shown):
    assert str(WeightSyncError("no", **fields)) == shown


def test_reports_are_not_shared():
    first, second = WeightSyncError("a"), WeightSyncError("b")
    first.report.append({})
    assert second.report == []

"""The Redis unit: only a server that keeps what it acknowledges, and clear errors when it is away or full."""

from __future__ import annotations

import logging

import msgspec
import numpy as np
import pytest
import redis

from redis_server import DURABLE, redis_server
from rillflow.dataflow.redis_unit import BUCKET_ROWS, RedisUnit
from rillflow.errors import BadRequest, ConfigError, CorruptData, DiskFull, Unavailable


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis"), *DURABLE) as found:
        yield found


@pytest.fixture
def unit(server, tmp_path):
    unit = RedisUnit(server.url, tmp_path.name, "3")
    yield unit
    unit.close()


def row(n=3):
    return {"tokens": np.arange(n, dtype="<i4"), "values.f4": np.ones(2, "<f4")}


@pytest.mark.parametrize("options", [DURABLE, ("--appendonly", "yes", "--appendfsync", "no")])
def test_rows_survive_the_death_of_the_server(tmp_path, options):
    with redis_server(tmp_path / "redis", *options) as server:
        unit = RedisUnit(server.url, "run")
        places = unit.put([row(n) for n in range(100)])
        server.kill()
        with pytest.raises(Unavailable, match="does not answer") as caught:
            unit.put([row()])
        assert "is it running" in caught.value.hint
        with pytest.raises(Unavailable):
            unit.get(places, ["tokens"])
        server.start()
        assert [len(one["tokens"]) for one in unit.get(places, ["tokens"])] == [4 * n for n in range(100)]
        unit.close()


@pytest.mark.parametrize(
    ("durability", "policy", "advice"),
    [("process", "everysec", "no"), ("machine", "everysec", "always"), ("machine", "no", "always")],
)
def test_a_server_that_may_lose_rows_is_refused(tmp_path, durability, policy, advice):
    with redis_server(tmp_path / "redis", "--appendonly", "yes", "--appendfsync", policy) as server:
        with pytest.raises(ConfigError) as caught:
            RedisUnit(server.url, "run", durability=durability)
        assert f"appendonly yes\n    appendfsync {advice}" in caught.value.hint


def test_a_server_that_evicts_is_refused(tmp_path):
    options = (*DURABLE, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    with redis_server(tmp_path / "redis", *options) as server, pytest.raises(ConfigError, match="evicts"):
        RedisUnit(server.url, "run")


def test_a_server_that_hides_its_settings_is_warned_about(tmp_path, caplog):
    with redis_server(tmp_path / "redis", "--rename-command", "CONFIG", "") as server:
        with caplog.at_level(logging.WARNING):
            unit = RedisUnit(server.url, "run")
        assert "appendfsync no" in caplog.text
        assert len(unit.put([row()])) == 1
        unit.close()


def test_a_full_server_is_a_full_disk(tmp_path):
    options = (*DURABLE, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with redis_server(tmp_path / "redis", *options) as server:
        unit = RedisUnit(server.url, "run")
        places = unit.put([row()])
        with pytest.raises(DiskFull):
            unit.put([{"values.f4": bytes(1 << 20)} for _ in range(100)])
        assert len(unit.get(places, ["tokens"])) == 1
        assert unit.info().free < 4 << 20
        unit.close()


def test_a_url_that_is_none_and_nobody_there():
    with pytest.raises(ConfigError, match="not a URL"):
        RedisUnit("http://somewhere", "run")
    with pytest.raises(Unavailable, match="does not answer"):
        RedisUnit("redis://127.0.0.1:1/0", "run", timeout=0.5)


def test_rows_are_hashes_of_columns_in_buckets(unit, server):
    places = unit.put([row(n) for n in range(BUCKET_ROWS + 1)])
    assert {place.segment for place in places[:-1]} == {places[0].segment}
    assert places[-1].segment > places[0].segment
    assert [place.offset for place in places] == [*range(BUCKET_ROWS), 0]
    with redis.Redis.from_url(server.url) as client:
        key = f"rillflow:{places[5].unit}:{places[5].segment}:5"
        assert client.hget(key, "tokens") == row(5)["tokens"].tobytes()
        assert set(client.hkeys(key)) == {b"", b"tokens", b"values.f4"}
        unit.drop([places[0].segment])
        assert client.keys(f"rillflow:{places[0].unit}:{places[0].segment}:*") == []
    assert unit.remaining([place.segment for place in places[-2:]]) == [places[-1].segment]


@pytest.mark.parametrize("damage", ["index", "no index", "no column", "longer"])
def test_damage_of_any_kind_is_noticed(unit, server, damage):
    (place,) = unit.put([row()])
    key = f"rillflow:{place.unit}:{place.segment}:{place.offset}"
    with redis.Redis.from_url(server.url) as client:
        match damage:
            case "index":
                client.hset(key, "", client.hget(key, "")[:-1] + b"?")
            case "no index":
                client.hdel(key, "")
            case "no column":
                client.hdel(key, "tokens")
            case "longer":
                client.hset(key, "tokens", row(4)["tokens"].tobytes())
    with pytest.raises(CorruptData):
        unit.get([place], ["tokens"])


def test_two_runs_and_two_units_of_one_server_do_not_meet(server, tmp_path):
    units = [RedisUnit(server.url, run, name) for run in (tmp_path.name + "a", tmp_path.name + "b") for name in "01"]
    assert len({unit.info().unit for unit in units}) == 4
    for n, unit in enumerate(units):
        (place,) = unit.put([row(n)])
        assert unit.get([place], ["tokens"]) == [{"tokens": row(n)["tokens"].tobytes()}]
    for unit in units:
        unit.close()


def test_a_server_that_lost_its_data_makes_it_another_unit(server, tmp_path, monkeypatch):
    """Its numbers begin again: what refers to a row of before must never get one of now."""
    monkeypatch.setattr("rillflow.dataflow.redis_unit.BUCKET_ROWS", 2)
    unit = RedisUnit(server.url, tmp_path.name)
    before = unit.put([row() for _ in range(4)])
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    after = unit.put([{"tokens": np.full(3, 7, "<i4"), "values.f4": np.ones(2, "<f4")} for _ in range(6)])
    assert not set(before) & set(after)
    assert {place.unit for place in after} == {unit.info().unit}
    assert unit.get(after[-1:], ["tokens"]) == [{"tokens": np.full(3, 7, "<i4").tobytes()}]
    for place in before:
        with pytest.raises((CorruptData, BadRequest)):
            unit.get([place], ["tokens"])
    unit.close()


def test_a_row_of_another_length_is_not_this_one(unit):
    (place,) = unit.put([row()])
    with pytest.raises(CorruptData, match="another row"):
        unit.get([msgspec.structs.replace(place, length=place.length + 4)], ["tokens"])

"""Flags, ``Settings`` and the environment variable say the same; every bad value gets one line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_verify_graphs
from sglang_verify_graphs.errors import SettingsError
from sglang_verify_graphs.nccl.profiles import PROFILES
from sglang_verify_graphs.settings import (
    ENV,
    Settings,
    add_arguments,
    mentions_flags,
    settings_from_args,
    settings_from_env,
)

ON = "--enable-verify-graphs"


def parse(*argv: str) -> Settings | None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings_from_args(parser.parse_args(argv))


settings_strategy = st.builds(
    Settings,
    steps=st.none() | st.lists(st.integers(0, 16), min_size=1, max_size=6),
    max_batch=st.none() | st.integers(1, 4096),
    memory_gb=st.none() | st.floats(0.01, 1e3) | st.integers(1, 100),
    observe=st.booleans(),
    strict=st.booleans(),
    allow_untested=st.booleans(),
    costs=st.none() | st.just("costs.json"),
    cold_zero=st.booleans(),
    script=st.lists(st.integers(0, 16), max_size=6),
    nccl_env=st.lists(st.sampled_from(["NCCL_ALGO=Ring", "NCCL_PROTO=^LL128"]), max_size=2),
    nccl_profile=st.none() | st.sampled_from(sorted(PROFILES)),
    nccl_reapply=st.booleans(),
    nccl_force_ll128=st.booleans(),
    nccl_shell=st.none() | st.just(["NCCL_PROTO=LL"]),
    nccl_driver=st.none() | st.just([]),
)


class TestCarriers:
    @pytest.mark.parametrize(
        ("argv", "expected"),
        [
            ([], Settings()),
            (["--verify-graph-steps", "3,1,0,3"], Settings(steps=(0, 1, 3))),
            (["--verify-graph-steps=0 1"], Settings(steps=(0, 1))),
            (["--verify-graph-max-batch", "48"], Settings(max_batch=48)),
            (["--verify-graph-memory-gb", "1.5"], Settings(memory_gb=1.5)),
            (["--verify-graph-observe"], Settings(observe=True)),
            (["--verify-graph-strict"], Settings(strict=True)),
            (["--verify-graph-allow-untested"], Settings(allow_untested=True)),
            (["--verify-graph-costs", "costs.json"], Settings(costs="costs.json")),
            (["--verify-graph-cold-zero"], Settings(cold_zero=True)),
            (
                ["--nccl-env", "NCCL_ALGO=Ring", "--nccl-env", "NCCL_PROTO=LL", "NCCL_DEBUG=WARN"],
                Settings(nccl_env=("NCCL_ALGO=Ring", "NCCL_PROTO=LL", "NCCL_DEBUG=WARN")),
            ),
            (["--nccl-profile", "pcie-p2p"], Settings(nccl_profile="pcie-p2p")),
            (["--nccl-reapply"], Settings(nccl_reapply=True)),
            (["--nccl-force-ll128"], Settings(nccl_force_ll128=True)),
        ],
    )
    def test_flag(self, argv: list[str], expected: Settings) -> None:
        assert parse(ON, *argv) == expected

    def test_without_the_flag_there_are_no_settings(self) -> None:
        assert parse() is None
        assert settings_from_env({}) is None
        assert settings_from_env({ENV: ""}) is None

    @given(settings_strategy)
    def test_json_round_trip(self, settings: Settings) -> None:
        assert settings_from_env({ENV: settings.to_json()}) == settings

    @given(settings_strategy)
    def test_settings_are_one_line_and_hashable(self, settings: Settings) -> None:
        assert "\n" not in settings.to_json()
        assert hash(settings) == hash(Settings.from_json(settings.to_json()))

    def test_every_flag_is_a_field(self) -> None:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        flags = {
            option.removeprefix("--verify-graph-").removeprefix("--").replace("-", "_")
            for action in parser._actions
            for option in action.option_strings
            if option.startswith(("--verify-graph-", "--nccl-"))
        }
        carried = {"script", "nccl_shell", "nccl_driver"}
        assert flags == set(Settings.__dataclass_fields__) - carried

    def test_every_flag_has_help(self) -> None:
        parser = argparse.ArgumentParser(prog="server")
        add_arguments(parser)
        assert all(action.help for action in parser._actions)
        assert "0,1,3" in parser.format_help()


BAD_FLAGS = [
    ("steps", "three"),
    ("steps", "-1"),
    ("steps", "1.5"),
    ("steps", ""),
    ("steps", "0,,x"),
    ("max-batch", "0"),
    ("max-batch", "-4"),
    ("max-batch", "many"),
    ("max-batch", "2.5"),
    ("memory-gb", "0"),
    ("memory-gb", "-1"),
    ("memory-gb", "nan"),
    ("memory-gb", "inf"),
    ("memory-gb", "8GB"),
    ("costs", ""),
]

BAD_FIELDS = [
    ("steps", ()),
    ("steps", "0,1"),
    ("steps", 3),
    ("steps", (1, -1)),
    ("steps", (1.0,)),
    ("steps", (True,)),
    ("script", "0,1"),
    ("script", 5),
    ("max_batch", 0),
    ("max_batch", True),
    ("max_batch", 2.0),
    ("max_batch", "8"),
    ("memory_gb", 0),
    ("memory_gb", True),
    ("memory_gb", "1"),
    ("memory_gb", float("nan")),
    ("observe", 1),
    ("strict", "yes"),
    ("allow_untested", None),
    ("costs", ""),
    ("costs", 5),
    ("costs", True),
    ("cold_zero", 1),
    ("script", (-1,)),
    ("nccl_env", "NCCL_ALGO=Ring"),
    ("nccl_env", 5),
    ("nccl_env", (5,)),
    ("nccl_env", None),
    ("nccl_shell", "NCCL_ALGO=Ring"),
    ("nccl_driver", 5),
    ("nccl_profile", ["pcie-p2p"]),
    ("nccl_reapply", 1),
    ("nccl_force_ll128", "yes"),
]


class TestBadValues:
    @pytest.mark.parametrize(("flag", "value"), BAD_FLAGS)
    def test_flag(self, flag: str, value: str) -> None:
        with pytest.raises(SettingsError) as caught:
            parse(ON, f"--verify-graph-{flag}={value}")
        self.one_line(caught.value, f"--verify-graph-{flag}", value)

    @pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
    def test_field(self, name: str, value: object) -> None:
        with pytest.raises(SettingsError) as caught:
            Settings(**{name: value})
        prefix = "--" if name.startswith("nccl_") else "--verify-graph-"
        self.one_line(caught.value, f"{prefix}{name.replace('_', '-')}", repr(value))

    @pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
    def test_enable_changes_nothing(
        self, name: str, value: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(ENV, raising=False)
        with pytest.raises(SettingsError):
            sglang_verify_graphs.enable(**{name: value})
        assert sglang_verify_graphs.status()["settings"] is None

    @staticmethod
    def one_line(error: SettingsError, flag: str, value: str) -> None:
        text = str(error)
        assert "\n" not in text
        assert flag in text
        assert value in text
        assert "must be" in text

    def test_a_flag_without_the_switch(self) -> None:
        with pytest.raises(SettingsError, match=f"--verify-graph-strict does nothing.*add {ON}"):
            parse("--verify-graph-strict")
        with pytest.raises(SettingsError, match=f"--nccl-env does nothing without.*add {ON}"):
            parse("--nccl-env", "NCCL_ALGO=Ring")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "not JSON"),
            ("[1]", "not a JSON object"),
            ("null", "not a JSON object"),
            ('{"step": [1]}', "unknown names ['step']"),
            ('{"steps": "0,1"}', "--verify-graph-steps"),
            ('{"memory_gb": NaN}', "--verify-graph-memory-gb"),
        ],
    )
    def test_environment(self, text: str, said: str) -> None:
        with pytest.raises(SettingsError) as caught:
            settings_from_env({ENV: text})
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
fields = st.sampled_from(sorted(Settings.__dataclass_fields__))


def settings_or_line(make: Callable[[], Settings | None]) -> Settings | None:
    """The settings, or None after an error whose message is one line; no other error."""
    try:
        return make()
    except SettingsError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    return None


class TestFuzz:
    @given(st.text() | st.dictionaries(fields, json_values).map(json.dumps))
    def test_from_json(self, text: str) -> None:
        found = settings_or_line(lambda: Settings.from_json(text))
        assert found is None or Settings.from_json(found.to_json()) == found

    @given(
        st.sampled_from([f"--verify-graph-{name}" for name in ("steps", "max-batch", "memory-gb")])
        | st.sampled_from(["--verify-graph-costs", "--nccl-env", "--nccl-profile"])
        | st.just("--nccl-env=NCCL_PROTO"),
        st.text(max_size=12),
    )
    def test_flags(self, flag: str, value: str) -> None:
        found = settings_or_line(lambda: parse(ON, f"{flag}={value}"))
        assert found is None or Settings.from_json(found.to_json()) == found


class TestStepsFor:
    def test_default_is_every_count_down_to_zero(self) -> None:
        assert Settings().steps_for(3) == (3, 2, 1, 0)

    @given(settings_strategy, st.integers(0, 20))
    def test_widest_first_and_the_configured_one_among_them(
        self, settings: Settings, configured: int
    ) -> None:
        wanted = {*(settings.steps or ()), *settings.script}
        if max(wanted, default=0) > configured:
            with pytest.raises(SettingsError) as caught:
                settings.steps_for(configured)
            assert f"--speculative-num-steps {max(wanted)} " in str(caught.value)
            assert f"--speculative-num-draft-tokens {max(wanted) + 1}" in str(caught.value)
            assert "\n" not in str(caught.value)
            return
        found = settings.steps_for(configured)
        assert found[0] == configured
        assert list(found) == sorted(set(found), reverse=True)
        assert wanted <= set(found)
        assert settings.steps is None or set(found) == wanted | {configured}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([ON], True),
        (["--model-path", "m", "--verify-graph-steps=1"], True),
        (["--config", "server.yaml"], True),
        (["--config=server.yaml"], True),
        (["--help"], True),
        (["-h"], True),
        ([], False),
        (["--model-path", "m", "--port", "1"], False),
    ],
)
def test_mentions_flags(argv: list[str], expected: bool) -> None:
    assert mentions_flags(argv) is expected

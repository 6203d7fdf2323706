"""Which NCCL values are asked for, how they travel, and who replaced them."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_verify_graphs.compat.nccl import SGLANG_WRITES
from sglang_verify_graphs.errors import SettingsError
from sglang_verify_graphs.nccl import native, profiles, proof, reach
from sglang_verify_graphs.nccl.evidence import RankEvidence
from sglang_verify_graphs.nccl.status import judge
from sglang_verify_graphs.settings import ENV, Settings, settings_from_env


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "worker", reach.Worker())
    monkeypatch.setattr(reach, "_replaced", {})


class TestRequests:
    def test_a_flag_over_the_shell_over_a_profile(self) -> None:
        found = profiles.requests(
            ["NCCL_ALGO=Tree"], "pcie-ll", ["NCCL_ALGO=Ring", "NCCL_P2P_LEVEL=PHB"]
        )
        assert found == {
            "NCCL_PROTO": ("allreduce:LL", "profile pcie-ll"),
            "NCCL_ALGO": ("Tree", "flag"),
            "NCCL_P2P_LEVEL": ("PHB", "shell"),
        }

    @pytest.mark.parametrize(
        "pair", ["PATH=/x", "NCCL_ALGO", "NCCL_ALGO=", "=1", "", "nccl_algo=Ring", "NCCL_A=\n1"]
    )
    def test_what_is_not_accepted(self, pair: str) -> None:
        with pytest.raises(SettingsError, match="--nccl-env") as caught:
            Settings(nccl_env=(pair,))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("pair", ["MY_TOKEN=s3cr3t", "NCCL_MY_TOKEN=s3cr\n3t"])
    def test_what_is_refused_is_named_without_its_value(self, pair: str) -> None:
        with pytest.raises(SettingsError, match="MY_TOKEN") as caught:
            Settings(nccl_env=(pair,))
        assert "s3cr" not in str(caught.value)

    def test_an_unknown_profile_names_the_known(self) -> None:
        with pytest.raises(SettingsError, match=r"unknown; known are no-ll128, pcie-ll, pcie-p2p"):
            Settings(nccl_profile="fast")

    def test_profiles_leave_alone_what_sglang_decides(self) -> None:
        # NCCL_ALGO is SGLang's under deterministic inference alone, which overwrites it, and says.
        chosen = {name for profile in profiles.PROFILES.values() for name in profile.values}
        assert chosen & set(SGLANG_WRITES) <= {"NCCL_ALGO"}
        assert all(profiles.accepted(name) for name in chosen)


class TestLL128:
    """Case 18. What a list says is decided by ``parseList`` in NCCL's src/graph/tuning.cc."""

    FORCING = (
        "LL128", "ll128", "LL,LL128", "Simple,ll128,LL", "allreduce:LL128", "^LL", "^Simple,LL",
        "LL;allreduce:LL128", "broadcast:LL;allreduce:^Simple", "^LL128;allreduce:LL128",
    )  # fmt: skip
    HARMLESS = (
        "LL", "Simple", "LL,Simple", "^LL128", "^LL,LL128", "allreduce:LL", "allreduce:^LL128",
        "LL;allreduce:Simple",
    )  # fmt: skip

    @pytest.mark.parametrize("value", FORCING)
    def test_refused_whoever_asks(self, value: str) -> None:
        pair = f"NCCL_PROTO={value}"
        for fields in ({"nccl_env": (pair,)}, {"nccl_shell": (pair,)}):
            with pytest.raises(SettingsError, match=r"corrupted.*--nccl-force-ll128"):
                Settings(**fields)  # type: ignore[arg-type]
            assert Settings(**fields, nccl_force_ll128=True)  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="corrupted"):
            reach.in_worker(Settings(), {"NCCL_PROTO": value})

    @pytest.mark.parametrize("value", HARMLESS)
    def test_allowed(self, value: str) -> None:
        assert Settings(nccl_env=(f"NCCL_PROTO={value}",))

    def test_no_profile_forces_it(self) -> None:
        for name in profiles.PROFILES:
            assert Settings(nccl_profile=name)

    @given(st.text())
    def test_any_text_is_judged(self, value: str) -> None:
        assert profiles.forces_ll128(value) in (True, False)


class TestLauncher:
    def test_set_before_sglang_looks_and_taken_back(self) -> None:
        environ = {"NCCL_ALGO": "Tree", "NCCL_PROTO": "Simple", "HF_TOKEN": "secret"}
        before = dict(environ)
        settings = reach.in_launcher(
            Settings(nccl_env=("NCCL_ALGO=Ring",), nccl_profile="no-ll128"), environ
        )
        assert (environ["NCCL_ALGO"], environ["NCCL_PROTO"]) == ("Ring", "Simple")
        assert settings_from_env(environ) == settings
        assert settings.nccl_shell == ("NCCL_ALGO=Tree", "NCCL_PROTO=Simple")
        assert "secret" not in settings.to_json()
        again = reach.in_launcher(Settings(nccl_env=("NCCL_PROTO=LL",)), environ)
        assert again.nccl_shell == settings.nccl_shell
        assert (environ["NCCL_ALGO"], environ["NCCL_PROTO"]) == ("Tree", "LL")
        reach.undo(environ)
        assert {**environ, ENV: ""} == {**before, ENV: ""}

    def test_a_refused_shell_changes_nothing(self) -> None:
        environ = {"NCCL_PROTO": "LL128"}
        with pytest.raises(SettingsError, match="shell"):
            reach.in_launcher(Settings(nccl_env=("NCCL_ALGO=Ring",)), environ)
        assert environ == {"NCCL_PROTO": "LL128"}

    @pytest.mark.parametrize(("found", "fine"), [((2, 23, 4), False), ((2, 24, 1), True)])
    def test_a_profile_names_the_nccl_that_it_needs(
        self, found: tuple[int, ...], fine: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reach, "installed_version", lambda: found)
        settings = Settings(nccl_profile="pcie-ll")
        if fine:
            reach.in_launcher(settings, {})
            return
        with pytest.raises(SettingsError, match=r"needs NCCL 2\.24 or newer, 2\.23\.4"):
            reach.in_launcher(settings, {})

    def test_what_sglang_decides_is_not_replaced_in_silence(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        reach.in_launcher(Settings(nccl_env=("NCCL_GRAPH_REGISTER=1", "NCCL_P2P_LEVEL=SYS")), {})
        (line,) = caplog.messages
        assert "NCCL_GRAPH_REGISTER=1 (flag): SGLang sets this one itself" in line


class TestWorker:
    def launched(self, **fields: Any) -> dict[str, str]:
        environ: dict[str, str] = {}
        reach.in_launcher(Settings(**fields), environ)
        return environ

    def start(self, environ: dict[str, str]) -> dict[str, str]:
        settings = settings_from_env(environ)
        assert settings is not None
        reach.in_worker(settings, environ)
        return reach.worker.overwritten

    def test_nothing_to_do_where_it_was_inherited(self) -> None:
        environ = self.launched(nccl_env=("NCCL_PROTO=LL",))
        assert self.start(environ) == {}
        assert environ["NCCL_PROTO"] == "LL"

    @pytest.mark.parametrize("reapply", [False, True])
    def test_what_sglang_replaced_is_named_and_set_again_if_asked(self, reapply: bool) -> None:
        name = "CUDA_DEVICE_MAX_CONNECTIONS"
        environ = self.launched(nccl_env=(f"{name}=1",), nccl_reapply=reapply)
        environ[name] = "8"
        assert self.start(environ) == {name: "SGLang (always)"}
        assert environ[name] == ("1" if reapply else "8")

    def test_what_was_set_again_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = Settings(nccl_env=("NCCL_NVLS_ENABLE=0",), nccl_shell=(), nccl_reapply=True)
        monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
        reach.in_worker(settings)
        found = proof.variables(reach.worker, native.c_environment(), os.environ)
        rank = RankEvidence(0, 1, "n", None, None, None, False, found)
        one = judge([rank])[0].variables["NCCL_NVLS_ENABLE"]
        assert (one.requested, one.effective) == ("0", "0")
        assert "SGLang (--enable-nccl-nvls" in one.evidence
        assert one.evidence.endswith("had replaced it, and it was set again")

    def test_another_writer(self) -> None:
        environ = self.launched(nccl_env=("NCCL_P2P_LEVEL=SYS",))
        environ["NCCL_P2P_LEVEL"] = "LOC"
        assert "after its flags were read" in self.start(environ)["NCCL_P2P_LEVEL"]

    def test_a_variable_that_did_not_arrive(self) -> None:
        environ = {ENV: Settings(nccl_env=("NCCL_ALGO=Ring",), nccl_shell=()).to_json()}
        assert self.start(environ) == {}
        assert environ["NCCL_ALGO"] == "Ring"

    def actor(self, raylet: dict[str, str], **fields: Any) -> dict[str, str]:
        driver = {"NCCL_SOCKET_IFNAME": "eth7", "NCCL_IB_TIMEOUT": "22"}
        reach.in_launcher(Settings(**fields), driver)
        driver |= {"NCCL_CUMEM_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}  # by SGLang
        return raylet | reach.for_actors(driver)

    def test_an_actor_gets_what_a_spawned_worker_inherits(self) -> None:
        environ = self.actor({}, nccl_env=("NCCL_ALGO=Ring",), nccl_profile="no-ll128")
        assert reach.in_actor(environ)
        assert self.start(environ) == {}
        assert {name: v for name, v in environ.items() if name != ENV} == {
            "NCCL_ALGO": "Ring",
            "NCCL_PROTO": "^LL128",
            "NCCL_IB_TIMEOUT": "22",
            "NCCL_CUMEM_ENABLE": "0",
            "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        }

    def test_a_node_of_its_own_keeps_its_shell_but_for_flags(self) -> None:
        own = {"NCCL_ALGO": "Tree", "NCCL_PROTO": "Simple", "NCCL_CUMEM_ENABLE": "1"}
        environ = self.actor(own, nccl_env=("NCCL_ALGO=Ring",), nccl_profile="no-ll128")
        assert self.start(environ) == {"NCCL_PROTO": "the environment of this node"}
        assert environ["NCCL_ALGO"] == "Ring"
        assert environ["NCCL_PROTO"] == "Simple"
        assert environ["NCCL_CUMEM_ENABLE"] == "1"

    def test_a_flag_for_a_device_travels_and_a_shell_one_stays(self) -> None:
        environ = self.actor({}, nccl_env=("NCCL_IB_HCA=mlx5_0",))
        self.start(environ)
        assert environ["NCCL_IB_HCA"] == "mlx5_0"
        assert "NCCL_SOCKET_IFNAME" not in environ

    def test_the_actor_class_is_started_with_the_settings(self) -> None:
        class Stock:
            def options(self, **options: Any) -> dict[str, Any]:
                return options

            def remote(self) -> str:
                return "stock"

        actors = reach.Actors(Stock())
        os.environ[ENV] = Settings(nccl_env=("NCCL_ALGO=Ring",), nccl_shell=()).to_json()
        try:
            given = actors.options(num_gpus=1, runtime_env={"env_vars": {"A": "1"}, "pip": ["x"]})
        finally:
            del os.environ[ENV]
        assert given["num_gpus"] == 1
        assert given["runtime_env"]["pip"] == ["x"]
        assert given["runtime_env"]["env_vars"].keys() == {"A", ENV}
        assert actors.options() == {"runtime_env": {"env_vars": {}}}
        assert actors.remote() == "stock"

    def test_the_actor_class_survives_pickling(self) -> None:
        copied = pickle.loads(pickle.dumps(reach.Actors("stock")))
        assert copied.upper() == "STOCK"


class TestFirstCommunicator:
    def begin(self, environ: dict[str, str]) -> dict[str, str]:
        reach.at_first_communicator(environ)
        if reach.worker.log is not None:
            reach.worker.log.parent.rmdir()
        return environ

    def test_nccl_writes_a_log_where_there_is_something_to_prove(self) -> None:
        reach.in_worker(Settings(nccl_env=("NCCL_ALGO=Ring",)), {})
        environ = self.begin({})
        assert environ["NCCL_DEBUG"] == "INFO"
        assert environ["NCCL_DEBUG_FILE"] == str(reach.worker.log)

    def test_no_log_where_nothing_was_asked_for(self) -> None:
        assert self.begin({}) == {}

    @pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"])
    def test_the_users_own_log_stays(self, name: str) -> None:
        reach.in_worker(Settings(nccl_env=("NCCL_ALGO=Ring",)), {})
        assert self.begin({name: "mine"}) == {name: "mine"}

    def test_only_the_first_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NCCL_ALGO", "Ring")
        self.begin({})
        monkeypatch.setenv("NCCL_ALGO", "Tree")
        self.begin({})
        assert reach.worker.first == {**(reach.worker.first or {}), "NCCL_ALGO": "Ring"}


class TestVariables:
    def judged(self, name: str) -> Any:
        found = proof.variables(reach.worker, native.c_environment(), os.environ)
        return next(v for v in found if v.name == name)

    def test_where_a_value_is_from(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NCCL_IB_TIMEOUT", "22")
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
        monkeypatch.setenv("NCCL_ALGO", "Ring")
        reach.in_worker(Settings(nccl_env=("NCCL_ALGO=Ring",), nccl_profile="pcie-p2p"))
        found = {
            v.name: (v.requested, v.effective, v.source)
            for v in proof.variables(reach.worker, native.c_environment(), os.environ)
        }
        os.environ.pop("NCCL_P2P_LEVEL")
        assert found["NCCL_ALGO"] == ("Ring", "Ring", "flag")
        assert found["NCCL_P2P_LEVEL"] == ("SYS", "SYS", "profile pcie-p2p")
        assert found["NCCL_CUMEM_ENABLE"] == (None, "0", "SGLang")
        assert found["NCCL_IB_TIMEOUT"] == (None, "22", "shell")
        assert all(profiles.accepted(name) for name in found)

    def test_late_is_what_changed_after_the_first_communicator(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Case 16."""
        monkeypatch.setenv("NCCL_PROTO", "LL")
        reach.at_first_communicator({})
        monkeypatch.setenv("NCCL_ALGO", "Ring")
        assert self.judged("NCCL_ALGO").late
        assert not self.judged("NCCL_PROTO").late
        monkeypatch.setenv("NCCL_PROTO", "Simple")
        assert self.judged("NCCL_PROTO").late

    def test_what_c_code_set_is_seen(self) -> None:
        libc = ctypes.CDLL(None)
        libc.setenv(b"NCCL_BUFFSIZE", b"4194304", 1)
        try:
            found = self.judged("NCCL_BUFFSIZE")
        finally:
            libc.unsetenv(b"NCCL_BUFFSIZE")
        assert (found.effective, found.python) == ("4194304", None)


class TestNative:
    MAPS = """\
7f00-7f01 r-xp 00000000 08:01 1   /v/nvidia/nccl/lib/libnccl.so.2
7f01-7f02 rw-p 00000000 08:01 1   /v/nvidia/nccl/lib/libnccl.so.2
7f02-7f03 r-xp 00000000 08:01 2   /opt/own build/nccl-test.so
7f03-7f04 r-xp 00000000 08:01 3   /usr/lib/libnccl-net.so
7f04-7f05 r-xp 00000000 08:01 4   /usr/lib/libnccl.so.2.30.7
7f05-7f06 rw-p 00000000 00:00 0
"""

    def test_libraries(self) -> None:
        assert native.nccl_libraries({}, self.MAPS) == [
            "/v/nvidia/nccl/lib/libnccl.so.2", "/usr/lib/libnccl.so.2.30.7",
        ]  # fmt: skip
        own = {"SGLANG_NCCL_SO_PATH": "/opt/own build/nccl-test.so"}
        assert own["SGLANG_NCCL_SO_PATH"] in native.nccl_libraries(own, self.MAPS)
        assert native.nccl_libraries({"SGLANG_NCCL_SO_PATH": ""}) == []

    def test_no_library_has_no_version(self) -> None:
        assert native.library_version("/does/not/exist.so") is None
        assert native.reopen_log("/does/not/exist.so") is False


def test_nothing_of_torch_or_sglang_is_needed_to_reach(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None; "
        "from sglang_verify_graphs.nccl import profiles, reach, native"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_version_that_cuda_images_export_is_no_setting() -> None:
    shell = {"NCCL_VERSION": "2.28.3-1", "NCCL_VERSIONS": "1", "NCCL_ALGO": "Ring"}
    assert profiles.as_pairs(shell) == ("NCCL_ALGO=Ring", "NCCL_VERSIONS=1")

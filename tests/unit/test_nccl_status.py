"""Every status, with the evidence it needs, and every way in which ranks can disagree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_verify_graphs.errors import EvidenceError
from sglang_verify_graphs.nccl.compare import mismatches
from sglang_verify_graphs.nccl.evidence import (
    FLAG,
    SGLANG,
    SHELL,
    Bypass,
    Choice,
    NcclLog,
    RankEvidence,
    Variable,
    decode,
)
from sglang_verify_graphs.nccl.status import RankStatus, VariableStatus, judge, report

SMALL = Choice("AllReduce", 8192, "RING", "LL", 2)
LARGE = Choice("AllReduce", 1 << 24, "RING", "LL", 24)
GATHER = Choice("AllGather", 607744, "RING", "LL", 12)
CUSTOM = Bypass("custom all-reduce", 8 << 20)
LATE = "set, ignored: communicator already up"


def asked(name: str, value: str | None = "LL", **other: object) -> Variable:
    """A variable that was asked for by a flag and has its value everywhere."""
    return replace(Variable(name, value, value, FLAG, value), **other)  # type: ignore[arg-type]


def evidence(
    *variables: Variable,
    rank: int = 0,
    world_size: int = 1,
    node: str = "alpha",
    log: NcclLog | None = None,
    bypasses: tuple[Bypass, ...] = (),
    communicator_up: bool = True,
) -> RankEvidence:
    return RankEvidence(
        rank, world_size, node, "2.27.3", "/lib/libnccl.so.2", "2.27.3", communicator_up,
        variables, log, bypasses,
    )  # fmt: skip


def log_of(*choices: Choice, **read: str) -> NcclLog:
    return NcclLog("2.27.3", {"NCCL_CUMEM_ENABLE": "0", **read}, {}, choices, 24, ("P2P/IPC",), 2)


def one(variable: Variable, log: NcclLog | None = None, *bypasses: Bypass) -> VariableStatus:
    (rank,) = judge([evidence(variable, log=log, bypasses=bypasses)])
    return rank.variables[variable.name]


def facts(found: VariableStatus) -> tuple[str, bool | str, bool | str]:
    return found.status, found.read_by_nccl, found.in_use


class TestStatus:
    def test_in_use(self) -> None:
        found = one(asked("NCCL_PROTO"), log_of(SMALL, LARGE, NCCL_PROTO="LL"))
        assert facts(found) == ("in use", True, True)
        assert found.evidence == (
            "NCCL read LL; it chose RING LL on 24 channels for AllReduce of 16777216 bytes"
        )

    def test_in_use_says_what_goes_past(self) -> None:
        found = one(asked("NCCL_PROTO"), log_of(SMALL, LARGE, NCCL_PROTO="LL"), CUSTOM)
        assert facts(found) == ("in use", True, True)
        assert found.evidence.endswith("past it: custom all-reduce (AllReduce below 8388608 bytes)")

    @pytest.mark.parametrize("path", ["custom all-reduce", "fusion", "torch symmetric memory"])
    def test_bypassed(self, path: str) -> None:
        """The choice was made for a probe; what is served takes another path."""
        found = one(asked("NCCL_PROTO"), log_of(SMALL, NCCL_PROTO="LL"), Bypass(path, 1 << 20))
        assert facts(found) == (f"bypassed by {path} (AllReduce below 1048576 bytes)", True, False)

    def test_the_bound_of_a_bypass_is_exact(self) -> None:
        at = Bypass("fusion", SMALL.bytes), Bypass("fusion", SMALL.bytes + 1)
        log = log_of(SMALL, NCCL_PROTO="LL")
        assert [one(asked("NCCL_PROTO"), log, b).in_use for b in at] == [True, False]

    def test_symmetric_kernels_of_nccl_bypass_its_tuning(self) -> None:
        kernel = Choice("AllReduce", 16384, "Symmetric", "AllReduce_AGxLL_R", 2)
        found = one(asked("NCCL_PROTO"), log_of(kernel, NCCL_PROTO="LL"))
        assert found.status == (
            "bypassed by NCCL's symmetric memory kernels (AllReduce below 16385 bytes)"
        )

    def test_a_bypass_of_one_collective_leaves_the_others(self) -> None:
        log = log_of(SMALL, GATHER, NCCL_PROTO="LL")
        assert one(asked("NCCL_PROTO"), log, CUSTOM).status == "in use"
        only = asked("NCCL_PROTO", "allreduce:LL")
        log = log_of(SMALL, GATHER, NCCL_PROTO="allreduce:LL")
        assert one(only, log, CUSTOM).status.startswith("bypassed by custom all-reduce")

    def test_read(self) -> None:
        found = one(asked("NCCL_BUFFSIZE", "4096"), log_of(LARGE, NCCL_BUFFSIZE="4096"))
        assert facts(found) == ("read by NCCL", True, "unknown")

    def test_read_and_not_followed(self) -> None:
        tree = replace(LARGE, algorithm="NVLS", protocol="SIMPLE")
        found = one(asked("NCCL_PROTO"), log_of(LARGE, tree, NCCL_PROTO="LL"))
        assert facts(found) == ("read by NCCL", True, False)
        assert "yet it chose NVLS SIMPLE" in found.evidence

    def test_no_choice_was_logged(self) -> None:
        found = one(asked("NCCL_PROTO"), log_of(NCCL_PROTO="LL"))
        assert facts(found) == ("read by NCCL", True, "unknown")

    def test_set(self) -> None:
        assert facts(one(asked("NCCL_PROTO"), log_of(LARGE))) == ("set", False, False)
        (rank,) = judge([evidence(asked("NCCL_PROTO"), communicator_up=False)])
        assert facts(rank.variables["NCCL_PROTO"]) == ("set", "unknown", "unknown")
        other = one(asked("CUDA_DEVICE_MAX_CONNECTIONS", "8"), log_of(LARGE))
        assert facts(other) == ("set", False, "unknown")

    @pytest.mark.parametrize("name", ["NCCL_PROTO", "NCCL_CUMEM_ENABLE", "NCCL_BUFFSIZE"])
    def test_without_a_log_nothing_is_known(self, name: str) -> None:
        assert facts(one(asked(name))) == ("unknown", "unknown", "unknown")

    def test_a_log_without_its_env_lines_says_nothing(self) -> None:
        log = replace(log_of(LARGE), read={})
        assert facts(one(asked("NCCL_PROTO"), log)) == ("unknown", "unknown", "unknown")
        assert facts(one(asked("NCCL_DEBUG"), log_of())) == ("unknown", "unknown", "unknown")

    def test_requested(self) -> None:
        found = one(asked("NCCL_PROTO", effective=None, python="LL"), log_of(LARGE))
        assert facts(found) == ("requested", False, False)
        assert "os.environ says LL, which NCCL does not see" in found.evidence

    def test_overridden(self) -> None:
        """A deliberate override is named with who did it, whatever NCCL then made of it."""
        changed = asked(
            "NCCL_NVLS_ENABLE", "1", effective="0", python="0", overwritten_by="SGLang (no flag)"
        )
        found = one(changed, log_of(LARGE, NCCL_NVLS_ENABLE="0"))
        assert facts(found) == ("overridden by SGLang (no flag)", True, False)
        assert found.evidence == "flag asked for 1"
        nobody = one(replace(changed, overwritten_by=None))
        assert nobody.status == "overridden by an unknown writer"

    def test_applied_again_after_an_override(self) -> None:
        again = asked("NCCL_PROTO", overwritten_by="SGLang")
        assert one(again, log_of(LARGE, NCCL_PROTO="LL")).status == "in use"

    def test_refused_by_nccl(self) -> None:
        reason = "Invalid NCCL_NTHREADS 33 (must be a multiple of 32)"
        log = replace(log_of(LARGE, NCCL_NTHREADS="33"), refused={"NCCL_NTHREADS": reason})
        found = one(asked("NCCL_NTHREADS", "33"), log)
        assert facts(found) == ("overridden by NCCL", True, False)
        assert found.evidence == reason

    @pytest.mark.parametrize("log", [None, log_of(LARGE), log_of(LARGE, NCCL_ALGO="tree")])
    def test_late(self, log: NcclLog | None) -> None:
        """Case 16: ``NCCL_ALGO`` is written after the first communicator."""
        found = one(asked("NCCL_ALGO", "ring", late=True), log)
        assert (found.status, found.in_use) == (LATE, False)
        assert found.read_by_nccl in (False, "unknown")

    def test_late_for_one_communicator_and_read_by_another(self) -> None:
        found = one(asked("NCCL_ALGO", "ring", late=True), log_of(LARGE, NCCL_ALGO="ring"))
        assert facts(found) == ("in use", True, True)
        assert found.evidence.endswith("communicators from before do not follow it")

    def test_nccl_read_another_value(self) -> None:
        """The environment changed after NCCL looked, whoever was watching."""
        found = one(asked("NCCL_PROTO", "LL"), log_of(LARGE, NCCL_PROTO="Simple"))
        assert facts(found) == (LATE, False, False)
        assert found.evidence == "NCCL read Simple before"

    def test_numbers_and_names_of_a_value_are_one(self) -> None:
        for value, heard in (("0x8", "8"), ("5", "SYS"), ("ring", "Ring")):
            assert one(asked("NCCL_X", value), log_of(NCCL_X=heard)).read_by_nccl is True

    def test_nobody_asked_and_nobody_set(self) -> None:
        assert facts(one(asked("NCCL_PROTO", None))) == ("not set", "unknown", False)


class TestProofs:
    """Which line shows that a value is followed, and which shows that it is not."""

    @pytest.mark.parametrize(
        ("name", "value", "in_use"),
        [
            ("NCCL_ALGO", "Ring", True),
            ("NCCL_ALGO", "allreduce:tree;allgather:ring", False),
            ("NCCL_ALGO", "^ring", False),
            ("NCCL_ALGO", "ring;allreduce:tree", False),
            ("NCCL_ALGO", "tree;allreduce:tree,RING", True),
            ("NCCL_ALGO", "broadcast:tree", "unknown"),
            ("NCCL_PROTO", "^LL128", True),
            ("NCCL_PROTO", "Simple", False),
            ("NCCL_MAX_NCHANNELS", "24", True),
            ("NCCL_MAX_NCHANNELS", "23", False),
            ("NCCL_MAX_NCHANNELS", "many", "unknown"),
            ("NCCL_MIN_NCHANNELS", "24", True),
            ("NCCL_MIN_NCHANNELS", "25", False),
            ("NCCL_NVLS_ENABLE", "0", True),
            ("NCCL_NVLS_ENABLE", "1", False),
            ("NCCL_CUMEM_ENABLE", "0", True),
            ("NCCL_CUMEM_ENABLE", "1", False),
            ("NCCL_P2P_DISABLE", "1", False),
            ("NCCL_P2P_DISABLE", "0", "unknown"),
            ("NCCL_SHM_DISABLE", "1", True),
            ("NCCL_P2P_LEVEL", "SYS", "unknown"),
        ],
    )
    def test_of_a_ring_over_ipc(self, name: str, value: str, in_use: bool | str) -> None:
        found = one(asked(name, value), log_of(LARGE, **{name: value}))
        assert found.in_use == in_use
        assert found.status == ("in use" if in_use is True else "read by NCCL")

    def test_of_nvls_over_cumem(self) -> None:
        nvls = replace(LARGE, algorithm="NVLS_TREE")
        read = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "2", "NCCL_ALGO": "NVLSTree"}
        log = replace(log_of(nvls, **read), transports=("P2P/CUMEM/read",))
        assert [one(asked(n, v), log).in_use for n, v in read.items()] == [True] * 3

    def test_a_rank_is_judged_by_the_choices_of_rank_0(self) -> None:
        """NCCL prints them on rank 0 of a communicator alone."""
        ranks = judge([
            evidence(asked("NCCL_PROTO"), log=log_of(LARGE, NCCL_PROTO="LL"), world_size=2),
            evidence(asked("NCCL_PROTO"), rank=1, log=log_of(NCCL_PROTO="LL"), world_size=2),
        ])  # fmt: skip
        assert [rank.variables["NCCL_PROTO"].status for rank in ranks] == ["in use"] * 2


_VALUES = st.none() | st.sampled_from(["LL", "Ring", "0", "1", "allreduce:ring", "^LL128", ""])
_VARIABLES = st.builds(
    Variable,
    st.sampled_from(
        ["NCCL_PROTO", "NCCL_ALGO", "NCCL_MAX_NCHANNELS", "NCCL_CUMEM_ENABLE", "X_KEY"]
    ),
    _VALUES,
    _VALUES,
    st.sampled_from([FLAG, SHELL, SGLANG, "profile low-latency"]),
    _VALUES,
    st.booleans(),
    st.none() | st.just("SGLang"),
)
_LOGS = st.builds(
    NcclLog,
    st.none() | st.just("2.27.3"),
    st.dictionaries(st.sampled_from(["NCCL_PROTO", "NCCL_ALGO", "NCCL_X"]), st.text(max_size=5)),
    st.dictionaries(st.just("NCCL_ALGO"), st.text(max_size=5)),
    st.lists(st.sampled_from([SMALL, LARGE, GATHER]), max_size=3).map(tuple),
    st.none() | st.integers(0, 64),
    st.lists(st.sampled_from(["P2P/IPC", "P2P/CUMEM", "SHM/direct"])).map(tuple),
)
_EVIDENCE = st.builds(
    RankEvidence,
    st.integers(0, 3),
    st.integers(0, 4),
    st.text(max_size=5),
    st.none() | st.text(max_size=5),
    st.none() | st.text(max_size=5),
    st.none() | st.text(max_size=5),
    st.booleans(),
    st.lists(_VARIABLES, max_size=3).map(tuple),
    st.none() | _LOGS,
    st.lists(st.just(CUSTOM), max_size=1).map(tuple),
)


class TestAnyEvidence:
    @given(_EVIDENCE)
    def test_it_travels_as_json(self, rank: RankEvidence) -> None:
        assert RankEvidence.from_dict(json.loads(json.dumps(rank.as_dict()))) == rank

    @given(st.lists(_EVIDENCE, max_size=3))
    def test_no_status_says_more_than_its_evidence(self, ranks: Sequence[RankEvidence]) -> None:
        chosen = any(rank.log and rank.log.choices for rank in ranks)
        judged = judge(ranks)
        for rank, found in zip(ranks, judged, strict=True):
            for name, v in found.variables.items():
                assert v.status
                assert v.evidence
                if rank.log is None:
                    assert v.read_by_nccl == "unknown" or not name.startswith("NCCL_")
                    assert v.in_use is not True
                if v.in_use is True:
                    assert v.read_by_nccl is True
                    assert chosen or (rank.log and (rank.log.channels or rank.log.transports))
        mismatches([judged])
        sent = json.loads(json.dumps(report(judged)))
        assert decode(tuple[RankStatus, ...], sent["ranks"], "ranks") == judged  # type: ignore[comparison-overlap]

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(
                st.sampled_from([*RankEvidence.__dataclass_fields__, "other"]), inner
            ),
        )
    )  # fmt: skip
    def test_what_is_not_evidence_is_an_error(self, data: object) -> None:
        with pytest.raises(EvidenceError, match="does not have the shape of"):
            RankEvidence.from_dict(data)

    def test_a_field_too_many_or_too_few_is_an_error(self) -> None:
        good = evidence().as_dict()
        for wrong in (good | {"other": 1}, {k: v for k, v in good.items() if k != "node"}):
            with pytest.raises(EvidenceError):
                RankEvidence.from_dict(wrong)

    @given(st.data())
    def test_one_wrong_field_is_an_error(self, data: st.DataObject) -> None:
        good = evidence(asked("NCCL_PROTO"), log=log_of(LARGE, NCCL_PROTO="LL")).as_dict()
        name = data.draw(st.sampled_from(sorted(good)))
        wrong = data.draw(st.sampled_from([1.5, {"a": 1}, [None], [1], {}, True, 3, "text"]))
        if type(wrong) is not type(good[name]) and not (name == "log" and wrong == {}):
            if isinstance(wrong, str) and name in ("nccl_version", "library", "packaged_version"):
                return
            with pytest.raises(EvidenceError, match=rf"evidence\.{name}"):
                RankEvidence.from_dict(good | {name: wrong})


def pair(first: RankEvidence, second: RankEvidence) -> list[str]:
    return [found.text for found in mismatches([judge([first, second])])]


class TestMismatches:
    log = log_of(LARGE, NCCL_PROTO="LL")
    first = evidence(asked("NCCL_PROTO"), world_size=2, log=log)
    second = replace(first, rank=1, node="beta")

    def test_equal_ranks(self) -> None:
        assert pair(self.first, self.second) == []

    def test_a_differing_rank(self) -> None:
        other = Variable("NCCL_PROTO", "Simple", "Simple", SHELL, "Simple")
        log = log_of(LARGE, NCCL_PROTO="Simple")
        (found,) = mismatches(
            [judge([self.first, replace(self.second, variables=(other,), log=log)])]
        )
        assert found.text == "NCCL_PROTO differs: LL on rank 0 (alpha); Simple on rank 1 (beta)"
        assert [place.rank for place in found.places] == [1]

    def test_a_rank_without_the_variable(self) -> None:
        texts = pair(self.first, replace(self.second, variables=()))
        assert texts == ["NCCL_PROTO differs: LL on rank 0 (alpha); not set on rank 1 (beta)"]

    def test_the_same_value_with_another_fate(self) -> None:
        texts = pair(self.first, replace(self.second, log=None))
        assert texts == ["NCCL_PROTO differs: in use on rank 0 (alpha); unknown on rank 1 (beta)"]

    def test_a_missing_rank(self) -> None:
        ranks = judge([replace(self.first, world_size=3), replace(self.second, world_size=3)])
        (found,) = mismatches([ranks])
        assert found.text == "rank 2 is missing: 2 of 3 ranks left evidence"

    def test_a_world_that_is_too_large_to_list(self) -> None:
        found = mismatches([judge([replace(self.first, world_size=10**18)])])
        assert len(found) == 16

    def test_a_rank_that_is_there_twice(self) -> None:
        assert "rank 0 (alpha) is there twice" in " ".join(pair(self.first, self.first))

    def test_a_rank_that_could_not_collect(self) -> None:
        failed = replace(self.second, nccl_version=None, variables=(), problem="OSError: no maps")
        assert pair(self.first, failed) == ["rank 1 (beta) has no evidence: OSError: no maps"]

    @pytest.mark.parametrize(
        ("field", "value", "text"),
        [
            ("nccl_version", "2.30.7", "NCCL version differs: 2.27.3 on rank 0 (alpha); 2.30.7"),
            (
                "library",
                "/b.so",
                "NCCL library differs: /lib/libnccl.so.2 on rank 0 (alpha); /b.so",
            ),
            (
                "packaged_version",
                "2.28.9",
                "installed NCCL differs: 2.27.3 on rank 0 (alpha); 2.28",
            ),
            ("world_size", 1, "world size differs: 2 on rank 0 (alpha); 1 on rank 1 (beta)"),
        ],
    )
    def test_another_library(self, field: str, value: str, text: str) -> None:
        changed = replace(self.second, **{field: value})  # type: ignore[arg-type]
        assert any(found.startswith(text) for found in pair(self.first, changed))

    def test_another_library_than_the_one_installed(self) -> None:
        ranks = [replace(r, packaged_version="2.27.30") for r in (self.first, self.second)]
        assert pair(*ranks) == [
            "NCCL 2.27.3 is loaded, 2.27.30 is installed, on rank 0 (alpha), rank 1 (beta)"
        ]
        assert pair(*(replace(r, packaged_version="2.27.3.post1") for r in ranks)) == []

    def test_an_override_and_a_late_write_are_named_where_all_ranks_agree(self) -> None:
        changed = asked("NCCL_NVLS_ENABLE", "1", effective="0", overwritten_by="SGLang")
        late = asked("NCCL_ALGO", "ring", late=True)
        ranks = [
            replace(r, variables=(changed, late), node="alpha") for r in (self.first, self.second)
        ]
        first, second = pair(*ranks)
        assert first.startswith("NCCL_NVLS_ENABLE=0: overridden by SGLang (flag asked for 1; ")
        assert second.startswith(f"NCCL_ALGO=ring: {LATE} (")
        assert all(text.endswith(", on ranks 0-1 (alpha)") for text in (first, second))

    def test_what_sglang_replaces_of_the_shell_keeps_no_strict_server_from_starting(self) -> None:
        """Images export CUDA_DEVICE_MAX_CONNECTIONS, and SGLang always writes it."""
        name = "CUDA_DEVICE_MAX_CONNECTIONS"
        for source, starts in ((SHELL, True), (FLAG, False)):
            changed = asked(name, "1", effective="8", overwritten_by="SGLang", source=source)
            ranks = [replace(r, variables=(changed,)) for r in (self.first, self.second)]
            (found,) = mismatches([judge(ranks)])
            assert (found.what, found.start) == (name, starts)

    def test_replicas_are_compared_too(self) -> None:
        alone = replace(self.first, world_size=1)
        other = replace(alone, variables=(asked("NCCL_PROTO", "Simple"),))
        texts = [found.text for found in mismatches([judge([alone]), judge([other])])]
        assert texts[0] == (
            "NCCL_PROTO differs: LL on dp 0 rank 0 (alpha); Simple on dp 1 rank 0 (alpha)"
        )


def test_values_of_secrets_stay_on_the_rank() -> None:
    names = ("NCCL_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_APIKEY", "db_password", "A_CREDENTIALS")
    log = replace(log_of(NCCL_TOKEN="s3cr3t"), refused={"NCCL_TOKEN": "Invalid s3cr3t"})
    variables = tuple(asked(name, "s3cr3t", effective="s3cr3t2") for name in names)
    judged = judge([evidence(*variables, log=log)])
    assert "s3cr3t" not in json.dumps(asdict(judged[0])) + repr(mismatches([judged]))
    assert one(asked("NCCL_IB_PKEY", "7")).effective == "7"

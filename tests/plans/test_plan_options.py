# SPDX-License-Identifier: Apache-2.0
"""Tests that a call's options, and scopes in jit's cache key, choose the plans."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import plans
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.plans import PlanOptions

_X = jnp.ones((3, 5), jnp.float32)
_W = jnp.ones((5, 7), jnp.float32)
_Q = jnp.ones((2, 3, 4, 8), jnp.float32)
_STRICT = PlanOptions(deterministic=True)


def _options_of(function, *args):
    found = {options for _, options, _ in traced_graphs(function, *args)}
    assert len(found) == 1
    return found.pop()


# --- what the options are -------------------------------------------------------------


def test_the_text_of_options_is_canonical():
    assert PlanOptions().to_request() == ""
    options = PlanOptions(
        heuristic_modes=("B", "A"),
        workspace_limit_bytes=0,
        engines=(3, 1, 3),
        denied_engines=(7,),
        required_notes=("TENSOR_CORE",),
        refused_notes=("RUNTIME_COMPILATION", "FFT"),
    )
    assert options.to_request() == (
        '{"denied_engines":[7],"deterministic":false,"engines":[1,3],'
        '"modes":["B","A"],"refused_notes":["FFT","REDUCED_PRECISION_REDUCTION",'
        '"RUNTIME_COMPILATION"],"required_notes":["TENSOR_CORE"],'
        '"workspace_limit_bytes":0}'
    )
    names = {field.name for field in dataclasses.fields(PlanOptions)}
    names -= {"heuristic_modes", "reduced_precision_reduction"}
    assert set(json.loads(options.to_request())) == {"modes", *names}


def test_sums_in_16_bits_are_refused_unless_they_are_asked_for():
    note = "REDUCED_PRECISION_REDUCTION"
    assert PlanOptions().all_refused_notes == (note,)
    few = PlanOptions(denied_engines=(3,))
    assert json.loads(few.to_request())["refused_notes"] == [note]
    allowed = PlanOptions(reduced_precision_reduction=True)
    assert json.loads(allowed.to_request())["refused_notes"] == []
    # What another field refuses is no other option when it is named once more.
    assert PlanOptions(refused_notes=(note,)) == PlanOptions()
    assert PlanOptions(refused_notes=(note,)).to_request() == ""
    named = PlanOptions(deterministic=True, refused_notes=("NONDETERMINISTIC", "FFT"))
    assert named == PlanOptions(deterministic=True, refused_notes=("FFT",))
    only = PlanOptions(reduced_precision_reduction=True, required_notes=(note,))
    assert json.loads(only.to_request())["required_notes"] == [note]


def test_equal_options_are_equal_however_written():
    given = PlanOptions(denied_engines=(9, 2), refused_notes=("FFT", "WINOGRAD"))
    other = PlanOptions(denied_engines=[2, 9, 2], refused_notes={"WINOGRAD", "FFT"})
    assert given == other
    assert hash(given) == hash(other)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"heuristic_modes": ()}, r"heuristic_modes=\(\) is not some of 'A', 'B'"),
        ({"heuristic_modes": ("A", "A")}, "each at most once"),
        ({"heuristic_modes": ("C",)}, r"\('C',\) is not some of 'A', 'B', 'FALLBACK'"),
        ({"workspace_limit_bytes": -1}, "workspace_limit_bytes=-1 is not a number"),
        ({"workspace_limit_bytes": 1.5}, "workspace_limit_bytes=1.5 is not a number"),
        ({"engines": ()}, r"engines=\(\) with denied_engines=\(\) allows none"),
        ({"engines": (3,), "denied_engines": (3, 4)}, r"allows none. Allow one"),
        ({"engines": (-3,)}, "engines has -3. Engines are ints"),
        ({"denied_engines": ("eng3",)}, "denied_engines has 'eng3'"),
        ({"required_notes": ("FAST",)}, "required_notes has 'FAST'. cuDNN's notes are"),
        ({"refused_notes": (5, "x")}, "refused_notes has 'x', 5. cuDNN's notes are"),
        ({"deterministic": "yes"}, "deterministic='yes' is neither True nor False"),
        *(
            (
                {name: value},
                rf"{name}={value!r} is not a tuple\. Pass \({value!r},\)\.$",
            )
            for name, value in (
                *(("heuristic_modes", "A"), ("engines", 3), ("denied_engines", 5)),
                *(("required_notes", "FFT"), ("refused_notes", "FFT")),
            )
        ),
        (
            {"denied_engines": None},
            r"denied_engines=None is not a tuple\. Pass \(\)\.$",
        ),
        ({"engines": ([1],)}, r"engines has '\[1\]'. Engines are ints"),
        (
            {"required_notes": ("FFT",), "refused_notes": ("FFT",)},
            "FFT is both required and refused. No plan",
        ),
        (
            {"required_notes": ("NONDETERMINISTIC",), "deterministic": True},
            r"both required and refused \(deterministic=True refuses it\)",
        ),
        (
            {"required_notes": ("REDUCED_PRECISION_REDUCTION",)},
            r"required and refused \(reduced_precision_reduction=False refuses it\)",
        ),
        (
            {
                "reduced_precision_reduction": True,
                "refused_notes": ("REDUCED_PRECISION_REDUCTION",),
            },
            "allows the note REDUCED_PRECISION_REDUCTION, which refused_notes has",
        ),
        (
            {"reduced_precision_reduction": 1},
            "reduced_precision_reduction=1 is neither True nor False",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        PlanOptions(**fields)


# --- how they reach a call ------------------------------------------------------------


_CALLS = {
    "matmul": lambda **given: jax_cudnn.matmul(_X, _W, **given),
    "dot_general": lambda **given: jax_cudnn.dot_general(
        _X, _W, (((1,), (0,)), ((), ())), **given
    ),
    "gated_matmul": lambda **given: jax_cudnn.gated_matmul(_X, _W, _W, **given),
    "conv": lambda **given: jax_cudnn.conv(
        _Q, jnp.ones((3, 3, 8, 5)), (1, 1), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"), **given,
    ),
    "gated_conv": lambda **given: jax_cudnn.gated_conv(
        _Q, jnp.ones((3, 3, 8, 5)), jnp.ones((3, 3, 8, 5)), (1, 1), "SAME",
        dimension_numbers="NHWC", **given,
    ),
    "sdpa": lambda **given: jax_cudnn.sdpa(_Q, _Q, _Q, **given),
}  # fmt: skip


@pytest.mark.parametrize("name", _CALLS)
def test_every_operation_takes_options_and_its_scope(name):
    call = _CALLS[name]
    assert _options_of(call).plan == PlanOptions()
    assert _options_of(lambda: call(plan=_STRICT)).plan == _STRICT
    with plans.using(_STRICT):
        assert _options_of(call).plan == _STRICT
        assert _options_of(lambda: call(plan=PlanOptions())).plan == PlanOptions()
    with plans.using(implementation="xla"):
        assert _options_of(call).implementation == "xla"
        cudnn = _options_of(lambda: call(implementation="cudnn"))
        assert cudnn.implementation == "cudnn"
    with pytest.raises(TypeError, match="plan='fast' is not a PlanOptions"):
        call(plan="fast")


def test_scopes_nest_field_by_field():
    call = _CALLS["matmul"]
    with plans.using(_STRICT):
        with plans.using(implementation="cudnn"):
            inner = _options_of(call)
        outer = _options_of(call)
    assert (inner.plan, inner.implementation) == (_STRICT, "cudnn")
    assert (outer.plan, outer.implementation) == (_STRICT, "auto")
    assert _options_of(call).plan == PlanOptions()


def test_jit_traces_again_in_another_scope_and_only_then():
    seen = []

    @jax.jit
    def f(x):
        seen.append(None)
        return jax_cudnn.matmul(x, _W)

    f(_X)
    with plans.using(_STRICT):
        f(_X)
        f(_X)
    with plans.using(PlanOptions(deterministic=True)):
        f(_X)
    f(_X)
    assert len(seen) == 2


def test_a_gradient_carries_the_options_of_its_call():
    def loss(x):
        return jnp.sum(jax_cudnn.matmul(x, _W, plan=_STRICT, activation="gelu"))

    found = [options.plan for _, options, _ in traced_graphs(jax.grad(loss), _X)]
    assert len(found) >= 2
    assert set(found) == {_STRICT}


def test_a_scope_refuses_what_a_call_refuses():
    with pytest.raises(TypeError, match="plan=3 is not a PlanOptions"):
        plans.using(3)
    with pytest.raises(ValueError, match="implementation='fast' is not one of"):
        plans.using(implementation="fast")

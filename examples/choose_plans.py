# SPDX-License-Identifier: Apache-2.0
"""Runs a batched matmul with engines compiled at run time, and with precompiled ones.

Lists cuDNN's plans with their notes, restricts a call to either kind of engine,
compares both results with jnp.matmul, and times them in turns. Without a GPU, XLA runs
all three.
"""

import statistics
import time

import jax
import jax.numpy as jnp

import jax_cudnn
from jax_cudnn import plans
from jax_cudnn.plans import PlanOptions

a = jax.random.normal(jax.random.key(0), (4, 64, 128), jnp.float16)
b = jax.random.normal(jax.random.key(1), (4, 128, 64), jnp.float16)

KINDS = {
    "JIT only": PlanOptions(required_notes=("RUNTIME_COMPILATION",)),
    "precompiled only": PlanOptions(refused_notes=("RUNTIME_COMPILATION",)),
}


def product_by(options: PlanOptions):
    return jax.jit(lambda a, b: jax_cudnn.matmul(a, b, plan=options))


functions = {kind: product_by(options) for kind, options in KINDS.items()}
functions["jnp.matmul"] = jax.jit(jnp.matmul)
exact = jnp.matmul(a, b, preferred_element_type=jnp.float32)

(call,) = plans.inspect(jax_cudnn.matmul, a, b).calls
if call.plan is None:
    print(f"no plans to list: {'; '.join(call.reasons)}")
else:
    print("cuDNN's candidates, its best guess first:")
    for candidate in call.candidates():
        print(f"  {candidate.name:44} {' '.join(candidate.behavior_notes)}")


def microseconds(function, calls=200):
    """Return the mean time of a call, from many calls in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        result = function(a, b)
    result.block_until_ready()
    return (time.perf_counter() - start) / calls * 1e6


for function in functions.values():
    microseconds(function, calls=10)
rounds = [{kind: microseconds(f) for kind, f in functions.items()} for _ in range(9)]
for kind, function in functions.items():
    error = float(jnp.max(jnp.abs(function(a, b).astype(jnp.float32) - exact)))
    times = [each[kind] for each in rounds]
    spread = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
    name = "XLA"
    if kind in KINDS:
        (call,) = plans.inspect(function, a, b).calls
        name = call.plan or "XLA"
    print(f"{kind:17} {name:44} largest error {error:.1e}, {spread} µs a call")

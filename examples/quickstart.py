# SPDX-License-Identifier: Apache-2.0
"""jax_cudnn.sdpa in a jitted function and its gradient, and where each part ran."""

import jax
import jax.numpy as jnp

import jax_cudnn
from jax_cudnn import plans

# (batch, length, heads, head size), in bf16 as cuDNN takes it.
query, key, value = jax.random.normal(
    jax.random.key(0), (3, 2, 77, 4, 64), jnp.bfloat16
)


@jax.jit
def loss(query, key, value):
    output = jax_cudnn.sdpa(query, key, value, is_causal=True)
    return jnp.mean(output.astype(jnp.float32) ** 2)


gradient = jax.grad(loss, argnums=(0, 1, 2))
print(f"loss {loss(query, key, value):.4f} on {jax.devices()[0].device_kind}")
for name, g in zip("qkv", gradient(query, key, value), strict=True):
    print(
        f"gradient of {name}: {g.dtype}{list(g.shape)}, largest {jnp.abs(g).max():.1e}"
    )
print(plans.inspect(gradient, query, key, value))

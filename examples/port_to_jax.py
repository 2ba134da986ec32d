"""A small transformer in PyTorch and its port to JAX, with one mistake in the port; clew finds it.

The port takes the weights of the original, both are recorded on the same batch, and the two runs are compared. The
mistake is one that many ports have: PyTorch's GELU is the exact one, JAX's is the approximation by tanh unless told
otherwise.

    python examples/port_to_jax.py            # the port as it is: clew says where it parts from the original
    python examples/port_to_jax.py --fixed    # with the mistake mended: the same within rounding
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch import nn

import clew

WIDTH, HEADS, WORDS = 16, 2, 20


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / (c // HEADS) ** 0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class JaxAttention(nnx.Module):
    def __init__(self, rngs):
        self.qkv, self.proj = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, HEADS, c // HEADS).transpose(2, 0, 3, 1, 4)
        weights = jax.nn.softmax(q @ k.swapaxes(-2, -1) / (c // HEADS) ** 0.5, axis=-1)
        return self.proj((weights @ v).swapaxes(1, 2).reshape(b, t, c))


class JaxBlock(nnx.Module):
    def __init__(self, rngs, *, approximate):
        self.norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.attn = JaxAttention(rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)
        self.approximate = approximate

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=self.approximate))


class JaxModel(nnx.Module):
    def __init__(self, *, approximate):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([JaxBlock(rngs, approximate=approximate) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="use the exact GELU in the port")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model()
    tokens = torch.randint(0, WORDS, (2, 7))
    targets = torch.randint(0, WORDS, (2, 7))
    with tempfile.TemporaryDirectory() as folder:
        with clew.watch({"model": model}, out=folder, name="torch", budget="off", status=False) as original:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
        port, report = clew.adapters.jax.import_weights(
            JaxModel(approximate=not args.fixed), model.state_dict()
        )
        print(f"weights: {str(report).splitlines()[0]}")
        x, y = jnp.asarray(tokens.numpy()), jnp.asarray(targets.numpy())

        def loss_of(model):
            logits = jax.nn.log_softmax(model(x))
            return -jnp.take_along_axis(logits, y[..., None], axis=-1).mean()

        with clew.adapters.jax.watch(port, name="jax", out=folder) as run:
            loss, grads = nnx.jit(nnx.value_and_grad(loss_of))(port)
            run.step(port, loss=loss, grads=grads)
        found = clew.diff(original.path, run.path)
    print(found.sentence)
    return 0 if found.is_same else 1


if __name__ == "__main__":
    raise SystemExit(main())

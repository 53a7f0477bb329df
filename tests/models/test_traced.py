"""Models under torch.compile(fullgraph=True) and torch.export, with static and dynamic lengths."""

import pytest
import torch

from lightning_dilated import LongNetClassifier, LongNetLM

from ..ext.slides.slides import batch, encoder, slides

pytestmark = pytest.mark.full

PATTERN = {"segment_lengths": [8, 32], "dilation_rates": [1, 2]}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_compiled_slide_encoder(pool):
    model = encoder(pool=pool, depth=1).eval()
    call = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for tiles in (23, 40):
        features, coords, _ = slides(tiles)
        same(call(features, coords), model(features, coords))


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_compiled_batches(pool):
    model = encoder(pool=pool, depth=1).eval()
    features, coords, lengths = slides(40, 23)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    same(call(features, coords, lengths), model(features, coords, lengths))
    same(
        torch.compile(model.embed, fullgraph=True, backend="aot_eager")(batch(40, 23)), model(features, coords, lengths)
    )


def test_compiled_slide_encoder_checks_coordinates():
    """Checks of values are nodes of the graph, so a compiled model refuses the same inputs as the eager model."""
    model = encoder(depth=1).eval()
    call = torch.compile(model, fullgraph=True, backend="eager")
    features, coords, _ = slides(23)
    call(features, coords)
    for wrong, word in ((coords - 3000, "negative"), (coords + 256 * 8, "grid"), (coords + 0.5, "whole pixels")):
        with pytest.raises(ValueError, match=word):
            call(features, wrong)


@pytest.mark.parametrize("dynamic", [False, True])
def test_exported_slide_encoder(dynamic):
    model = encoder().eval()
    features, coords, _ = slides(23)
    shapes = ({1: torch.export.Dim("tiles", min=2, max=64)},) * 2 if dynamic else None
    graph = torch.export.export(model, (features, coords), dynamic_shapes=shapes).module()
    for tiles in (23, 2, 40, 64) if dynamic else (23,):
        features, coords, _ = slides(tiles)
        same(graph(features, coords), model(features, coords))  # the exported model remains usable
    with pytest.raises(ValueError, match="negative"):
        graph(features, coords - 3000)


def test_one_node():
    """The op is one node of a compiled or exported graph. Only `export` decomposes it."""
    model = LongNetLM(PATTERN, dim=16, depth=2, num_heads=2).eval()
    model.configure_model()
    graph = torch.export.export(model, (torch.zeros(1, 40, dtype=torch.int64),)).graph
    assert sum(node.target is torch.ops.lightning_dilated.attention.default for node in graph.nodes) == 2


@pytest.mark.parametrize("pool", ["mean", "first"])
def test_classifier(pool):
    model = LongNetClassifier(PATTERN, feature_dim=6, num_classes=3, dim=16, depth=1, num_heads=2, pool=pool).eval()
    model.configure_model()
    x = torch.randn(2, 40, 6)
    shapes = ({1: torch.export.Dim("tokens", min=2, max=64)},)
    graph = torch.export.export(model, (x,), dynamic_shapes=shapes).module()
    call = torch.compile(model, fullgraph=True, backend="eager")
    for tokens in (40, 9):
        torch.testing.assert_close(graph(x[:, :tokens]), model(x[:, :tokens]))
        torch.testing.assert_close(call(x[:, :tokens]), model(x[:, :tokens]))

"""An edit of `image:`: the versions in the images of engine and keeper are compared before a container is replaced."""

import json
import subprocess
from collections.abc import Callable, Iterator

import pytest
from stand import Stand, run, until

from weightkeeper.supervisor.builds import TORCH_LABEL, VLLM_LABEL
from weightkeeper.supervisor.provision import FROM_DISK, PUBLISHED

pytestmark = pytest.mark.docker

OURS = "model: /model\nload-format: weightkeeper\n"
HEALTHY = "engine healthy S after recreate"
VERSIONS = {"old": "0.32.0", "again": "0.32.0", "new": "0.33.0", "unlabelled": ""}


@pytest.fixture(scope="module")
def images(image: str) -> Iterator[dict[str, str]]:
    """Name → an image of the stand-ins whose label has that version."""
    made = {name: image.replace("standin:", f"standin-{name}:") for name in VERSIONS}
    for name, tag in made.items():
        label = f'LABEL {VLLM_LABEL}="{VERSIONS[name]}"\n' if VERSIONS[name] else ""
        subprocess.run(
            ["docker", "build", "--quiet", "--tag", tag, "-"], input=f"FROM {image}\n{label}", text=True, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
    yield made
    run("docker", "rmi", "--force", *made.values())


@pytest.fixture
def use(prepared: Stand, images: dict[str, str]) -> Callable[[str], None]:
    """Write the name of another image into the engine's definition; the sidecar's is the old one."""
    text = prepared.compose_yaml.read_text()
    text = text.replace(
        "  sidecar:\n    <<: *stand-in\n", f"  sidecar:\n    <<: *stand-in\n    image: {images['old']}\n"
    )

    def write(name: str) -> None:
        chosen = images.get(name, name)
        prepared.compose_yaml.write_text(
            text.replace("  engine:\n    <<: *engine\n", f"  engine:\n    <<: *engine\n    image: {chosen}\n")
        )

    write("old")
    prepared.engine_yaml.write_text(OURS)
    prepared.up()
    prepared.supervise()
    return write


def image_of(stand: Stand) -> str:
    return stand.inspect()["Config"]["Image"]


def test_an_image_with_the_same_vllm_is_a_plain_recreation(prepared, use, images):
    """There is nothing to say about weights."""
    use("again")
    prepared.only(f"recreate engine: image {images['old']} → {images['again']}", HEALTHY)
    assert image_of(prepared) == images["again"]


def test_an_image_of_which_nothing_is_known_is_used_and_said(prepared, use, images):
    """It has no label."""
    use("unlabelled")
    said = f"(not known whether {images['unlabelled']} has the vLLM of sidecar)"
    prepared.only(f"recreate engine: image {images['old']} → {images['unlabelled']} {said}", HEALTHY)
    assert image_of(prepared) == images["unlabelled"]


@pytest.mark.parametrize(
    ("extra", "note"), [('{"publish": true, "fallback": false}', PUBLISHED), ('{"fallback": true}', FROM_DISK)]
)
def test_an_image_with_another_vllm_is_used_where_the_engine_can_do_without_the_keeper(
    prepared, use, images, extra, note
):
    """With both versions, and where the weights come from."""
    prepared.engine_yaml.write_text(f"{OURS}model-loader-extra-config: {extra}\n")
    prepared.expect("engine healthy")
    use("new")
    until(lambda: len(prepared.done()) == 2, lambda: prepared.log.read_text())
    versions = f"({images['new']} has vLLM 0.33.0, the keeper of sidecar vLLM 0.32.0)"
    assert prepared.messages()[-2:] == [
        f"recreate engine: image {images['old']} → {images['new']} {versions} {note}", HEALTHY,
    ]  # fmt: skip
    assert image_of(prepared) == images["new"]


def test_an_image_with_another_vllm_is_refused_where_the_engine_could_not_start(prepared, use, images):
    """The container stays, said once; what takes the reason away has it made."""
    strict = f'{OURS}model-loader-extra-config: {{"fallback": false}}\n'
    prepared.engine_yaml.write_text(strict)
    prepared.expect("engine healthy")
    before = prepared.start_of()
    use("new")
    prepared.expect(f"refuse engine: image {images['old']} → {images['new']}: other weights, ")
    assert "has vLLM 0.33.0, the keeper of sidecar vLLM 0.32.0" in prepared.messages()[-1]
    assert prepared.messages()[-1].endswith("or allow `publish` or `fallback` in model-loader-extra-config")
    shown = prepared.weightkeeper("plan").stdout
    assert shown.startswith("refuse engine: ") and "0.33.0" in shown
    (prepared.directory / "engine.env").write_text("# other\nA=1\nB=2\n")
    prepared.expect("nothing to do: engine.env changed, no value did")
    assert sum(line.startswith("refuse") for line in prepared.messages()) == 1
    assert prepared.start_of() == before
    prepared.engine_yaml.write_text(OURS)
    until(lambda: image_of(prepared) == images["new"], lambda: prepared.log.read_text())
    until(lambda: prepared.done()[-1] == ("recreate", "healthy"), lambda: prepared.log.read_text())


def test_an_image_that_is_not_here_is_one_of_which_nothing_is_known(prepared, use, images):
    """Compose pulls it when the container is made."""
    prepared.end()
    use("not-here:1")
    assert prepared.weightkeeper("plan").stdout == (
        f"recreate engine: image {images['old']} → not-here:1 (not known whether not-here:1 has the vLLM of sidecar)\n"
    )


@pytest.mark.parametrize("service", ["sidecar", "engine"])
def test_the_labels_of_our_images_are_what_is_installed(service):
    """`make images` finds the versions, and the build compares them."""
    asked = "import importlib.metadata as m; print(m.version('vllm'), m.version('torch'))"
    name = f"weightkeeper-{service}:local"
    installed = run("docker", "run", "--rm", "--entrypoint", "python3", name, "-c", asked)
    labels = json.loads(run("docker", "image", "inspect", "--format", "{{json .Config.Labels}}", name))
    assert f"{labels[VLLM_LABEL]} {labels[TORCH_LABEL]}\n" == installed

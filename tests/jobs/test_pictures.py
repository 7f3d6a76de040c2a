"""What becomes of each kind of picture: the numbers that a model gets, or an error that names why
not."""

import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from jitney.errors import InvalidArgumentError
from jitney_jobs.pictures import pixels_of
from PIL import Image, ImageCms

from tests.jobs.picture_files import encoded, profile_of_four_colours, turned, with_tag

STEPS = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
GREY = Image.fromarray(STEPS)
RED = (255, 0, 0)
WITHOUT_LOSS: dict[str, dict[str, Any]] = {
    "PNG": {},
    "TIFF": {},
    "WEBP": {"lossless": True},
    "JPEG": {"quality": 100},
}


def grey_of(data: bytes) -> np.ndarray:
    return pixels_of(data, width=8, height=8, channels=1)[:, :, 0]


def colour_of(data: bytes, x: int = 0, y: int = 0) -> tuple[int, ...]:
    return tuple(pixels_of(data, width=8, height=8, channels=3)[y, x].tolist())


@pytest.mark.parametrize("format", WITHOUT_LOSS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_upright(format: str, orientation: int) -> None:
    """Stored turned so that the orientation of its EXIF makes it upright."""
    stored = {
        1: STEPS,
        2: STEPS[:, ::-1],
        3: STEPS[::-1, ::-1],
        4: STEPS[::-1],
        5: STEPS.T,
        6: np.rot90(STEPS),
        7: STEPS[::-1, ::-1].T,
        8: np.rot90(STEPS, -1),
    }[orientation]
    image = Image.fromarray(np.ascontiguousarray(stored))
    data = turned(image, format, orientation, **WITHOUT_LOSS[format])
    np.testing.assert_array_equal(grey_of(data), STEPS)


def test_a_picture_that_is_not_square_is_turned_before_it_is_resized() -> None:
    wide = Image.fromarray(np.repeat(STEPS, 2, axis=1))
    data = turned(wide, "PNG", 6)
    upright = Image.fromarray(np.rot90(np.asarray(wide), -1)).resize((8, 8))
    np.testing.assert_array_equal(grey_of(data), np.asarray(upright))


def test_damaged_exif_counts_as_none() -> None:
    data = encoded(GREY, "JPEG", quality=100, exif=b"Exif\0\0II*\0\xff\xff\xff\xffdamaged")
    np.testing.assert_array_equal(grey_of(data), STEPS)


@pytest.mark.parametrize(
    ("format", "kind"),
    [
        ("PNG", "<u2"),
        ("PNG", ">u2"),
        ("TIFF", "<u2"),
        ("TIFF", ">u2"),
        ("TIFF", "<i4"),
        ("PPM", "<u2"),
    ],
)
def test_whole_numbers_of_16_bits_are_scaled_to_8(format: str, kind: str) -> None:
    image = Image.fromarray((STEPS.astype(np.uint32) * 257).astype(kind))
    np.testing.assert_array_equal(grey_of(encoded(image, format)), STEPS)


def test_whole_numbers_of_a_16_bit_scan_are_rounded() -> None:
    image = Image.fromarray(STEPS.astype(np.uint16) * 257 + 128)
    np.testing.assert_array_equal(grey_of(encoded(image, "PNG")), STEPS)
    image = Image.fromarray(STEPS.astype(np.uint16) * 257 + 129)
    np.testing.assert_array_equal(grey_of(encoded(image, "PNG")), STEPS + 1)


def test_12_bits_of_a_tiff() -> None:
    values = np.rint(STEPS.ravel() * (4095 / 255)).astype(int)
    packed = bytearray()
    for first, second in values.reshape(-1, 2).tolist():
        packed += bytes([first >> 4, (first & 15) << 4 | second >> 8, second & 255])
    data = encoded(Image.fromarray(STEPS.astype(np.uint16)), "TIFF")
    pixels = data.index(STEPS.astype("<u2").tobytes())
    data = data[:pixels] + bytes(packed).ljust(128, b"\0") + data[pixels + 128 :]
    np.testing.assert_array_equal(grey_of(with_tag(data, 258, 12)), STEPS)


@pytest.mark.parametrize("kind", ["u1", "u2", "f4"])
def test_a_tiff_whose_white_is_0(kind: str) -> None:
    scale = {"u1": 1, "u2": 257, "f4": 1 / 255}[kind]
    image = Image.fromarray((STEPS * np.float64(scale)).astype(kind))
    data = with_tag(encoded(image, "TIFF"), 262, 0)
    np.testing.assert_array_equal(grey_of(data), 255 - STEPS)


def test_floats_of_0_to_1() -> None:
    image = Image.fromarray(STEPS.astype(np.float32) / 255)
    np.testing.assert_array_equal(grey_of(encoded(image, "TIFF")), STEPS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (STEPS.astype(np.float32), "floats from 0 to 252', but must be floats of 0 to 1"),
        (STEPS.astype(np.float32) - 0.5, "floats from -0.5 to 251.5"),
        (np.full((8, 8), np.nan, np.float32), "floats from nan to nan"),
        (STEPS.astype(np.int32) * 1000, "whole numbers from 0 to 252,000', but must be of 0 to"),
        (STEPS.astype(np.int32) - 5, "whole numbers from -5 to 247"),
    ],
)
def test_numbers_of_no_known_scale(values: np.ndarray, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        grey_of(encoded(Image.fromarray(values), "TIFF"))


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_cmyk_by_its_profile_else_by_pillow(format: str) -> None:
    cyan = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    without = encoded(cyan, format)
    assert colour_of(without) == (0, 255, 255)
    red, green, blue = colour_of(encoded(cyan, format, icc_profile=profile_of_four_colours()))
    assert red > 240
    assert max(green, blue) < 20
    of_screens = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for unfit in (b"damaged", of_screens):
        assert colour_of(encoded(cyan, format, icc_profile=unfit)) == (0, 255, 255)


def half_transparent() -> Image.Image:
    """Red above; below nothing, over black."""
    rows = np.zeros((8, 8, 4), np.uint8)
    rows[:4] = (*RED, 255)
    return Image.fromarray(rows)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "GIF", "WEBP"])
def test_what_is_transparent_lies_on_white(format: str) -> None:
    data = encoded(half_transparent(), format, **WITHOUT_LOSS.get(format, {}))
    assert colour_of(data, y=0) == RED
    assert colour_of(data, y=7) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["P", "L", "LA", "RGB", "RGBA"])
def test_transparency_of_each_mode(mode: str) -> None:
    """A colour that stands for nothing, or a channel."""
    image = Image.new("L", (8, 8), 0)
    image.paste(100, (0, 0, 8, 4))
    options: dict[str, Any] = {}
    if mode in ("LA", "RGBA"):
        image.putalpha(image.point(lambda value: 255 if value else 0))
    elif mode == "RGB":
        options["transparency"] = (0, 0, 0)
    else:
        options["transparency"] = 0
    if mode != image.mode:
        image = image.convert(mode)
    data = encoded(image, "PNG", **options)
    assert grey_of(data)[[0, 7], 0].tolist() == [100, 255]


def test_half_of_a_colour_lies_on_white() -> None:
    data = encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 128)), "PNG")
    assert colour_of(data) == (127, 127, 127)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "TIFF", "PNG"])
def test_the_first_picture_of_several_is_taken(format: str) -> None:
    first, *others = [Image.new("RGB", (8, 8), color) for color in (RED, "blue", "lime")]
    data = encoded(
        first, format, save_all=True, append_images=others, **WITHOUT_LOSS.get(format, {})
    )
    assert colour_of(data) == RED


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "YCbCr", "LAB"])
def test_black_and_white_of_each_mode(mode: str) -> None:
    """White is as white as the colours of the mode allow."""
    image = Image.new("L", (8, 8), 0)
    image.paste(255, (0, 0, 8, 4))
    if mode == "LAB":
        profiles = [ImageCms.createProfile(name) for name in ("sRGB", "LAB")]
        image = ImageCms.profileToProfile(image.convert("RGB"), *profiles, outputMode="LAB")
    else:
        image = image.convert(mode)
    data = encoded(image, "TIFF" if mode in ("YCbCr", "LAB") else "PNG")
    assert grey_of(data)[[0, 7], 0].tolist() == pytest.approx([255, 0], abs=2)


def chunk_of_png(name: bytes, data: bytes) -> bytes:
    check = struct.pack(">L", zlib.crc32(name + data))
    return struct.pack(">L", len(data)) + name + data + check


def bomb() -> bytes:
    """A file of some hundred bytes that claims ten thousand million pixels."""
    head = struct.pack(">2L5B", 100_000, 100_000, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk_of_png(*chunk) for chunk in chunks)


NO_PICTURES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "cannot be read: it is empty"),
    "text": (b"no picture", "its first bytes, 6e 6f 20 70 69 63 74 75, are those of no known"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(16), "it is HEIC, which the installed Pillow does not"),
    "a damaged avif": (b"\0\0\0\x18ftypavif" + bytes(16), "AVIF|decode"),
    "jpeg xl": (b"\xff\x0a" + bytes(16), "it is JPEG XL, which"),
    "svg": (b'\n<svg xmlns="http://www.w3.org/2000/svg"/>', "it is SVG, which"),
    "pdf": (b"%PDF-1.7", "it is PDF, which"),
    "a truncated jpeg": (encoded(GREY.resize((400, 400)), "JPEG")[:-900], "image file is trunc"),
    "a truncated png": (encoded(GREY.resize((400, 400)), "PNG")[:-900], "the picture cannot be"),
    "a bomb": (bomb(), r"too large: Image size \(10000000000 pixels\) exceeds limit"),
    "a program": (encoded(GREY, "EPS"), "the format of the picture is 'EPS', but must be one whos"),
}


@pytest.mark.parametrize("kind", NO_PICTURES)
def test_what_is_no_picture_is_named(kind: str) -> None:
    data, message = NO_PICTURES[kind]
    with pytest.raises(InvalidArgumentError, match=message):
        grey_of(data)


def test_a_large_picture_is_read_without_a_warning() -> None:
    large = encoded(Image.new("1", (10_000, 9_000), 1), "PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grey_of(large).min() == 255

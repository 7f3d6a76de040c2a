"""Decodes a row's picture: upright, on white, in grey or RGB of 8 bits. Called by ``tensors.py``.

What a file means is not left to chance:

- the orientation of EXIF (or of TIFF) is applied;
- of an animation, or of a file of several pages, the first picture is taken;
- what is transparent lies on white;
- whole numbers of 16 bits are scaled to 8; floats are to be from 0 to 1;
- CMYK becomes RGB by the profile in the file, and by Pillow's formula if there is none.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jitney.errors import InstallationError, InvalidArgumentError, install_extra

try:
    from PIL import Image, ImageCms, ImageOps, TiffImagePlugin, UnidentifiedImageError
except ImportError:
    raise InstallationError(f"images need pillow: {install_extra('jobs')}") from None

_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
"""Tags of TIFF."""
_WHITE_IS_ZERO = 0
"""A value of ``_PHOTOMETRIC``."""
_RUNS_A_PROGRAM = ("EPS",)
"""Pillow has these drawn by another program, which the file's author would control."""
_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
}
"""In bytes 8 to 12 of a file whose bytes 4 to 8 are ``ftyp``."""
_STARTS = {
    b"\xff\x0a": "JPEG XL",
    b"\x00\x00\x00\x0cJXL ": "JPEG XL",
    b"%PDF": "PDF",
    b"<svg": "SVG",
    b"<?xml": "XML, perhaps SVG",
    b"<!DOCTYPE": "HTML",
    b"<html": "HTML",
}
"""Of files that are taken for pictures, and that Pillow does not read."""


def pixels_of(data: bytes, width: int, height: int, channels: int) -> np.ndarray:
    """The picture in the bytes of a file, resized: uint8 [height, width, channels]. ``channels``: 1
    for grey, 3 for RGB. Raises InvalidArgumentError for what is no picture, is damaged, or has
    values of no known scale."""
    with _decode_errors(data), Image.open(io.BytesIO(data)) as image:
        if image.format in _RUNS_A_PROGRAM:
            bound = "one whose files hold pixels"
            raise InvalidArgumentError.of("the format of the picture", image.format, bound)
        image.load()
        _turn_upright(image)
        eight_bits = _to_eight_bits(image)
        picture = eight_bits.convert("L" if channels == 1 else "RGB")
        resized = picture.resize((width, height))
    return np.asarray(resized, np.uint8).reshape(height, width, channels)


@contextlib.contextmanager
def _decode_errors(data: bytes) -> Iterator[None]:
    """Any error of Pillow's becomes an InvalidArgumentError: a damaged file can raise anything."""
    try:
        with warnings.catch_warnings():
            # Of damaged EXIF or a large picture: nobody would read them among a million rows. At
            # twice the size that Pillow warns of, it raises DecompressionBombError.
            warnings.simplefilter("ignore")
            yield
    except (InvalidArgumentError, InstallationError):
        raise
    except UnidentifiedImageError:
        raise InvalidArgumentError(f"the picture cannot be read: {_guess(data)}") from None
    except Image.DecompressionBombError as error:
        raise InvalidArgumentError(f"the picture is too large: {error}") from None
    except Exception as error:
        why = str(error) or type(error).__name__
        raise InvalidArgumentError(f"the picture cannot be decoded: {why}") from None


def _guess(data: bytes) -> str:
    """What a file is that Pillow does not know."""
    if not data:
        return "it is empty"
    kind = None
    if data[4:8] == b"ftyp":
        kind = _BRANDS.get(data[8:12])
    start = data.lstrip()[:16]
    for known, name in _STARTS.items():
        if start.startswith(known):
            kind = name
    if kind is None:
        return f"its first bytes, {data[:8].hex(' ')}, are those of no known format"
    return f"it is {kind}, which the installed Pillow does not read; convert it, to PNG for example"


def _turn_upright(image: Image.Image) -> None:
    """By its EXIF. Damaged EXIF counts as none."""
    with contextlib.suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)


# ------------------------------------------------------------------------ modes of Pillow


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """A picture of 8 bits without transparency, which Pillow converts to grey and to RGB."""
    mode = image.mode
    if mode == "I" or mode.startswith("I;16"):
        return _of_whole_numbers(image)
    if mode == "F":
        return _of_floats(image)
    if mode == "CMYK":
        return _of_cmyk(image)
    if mode == "LAB":
        return _converted(image, ImageCms.createProfile("LAB"))
    if image.has_transparency_data or mode in ("La", "RGBa"):
        return _on_white(image)
    return image


def _of_whole_numbers(image: Image.Image) -> Image.Image:
    """16 bits, or 12 of TIFF, scaled to 8. Pillow also has 32 bits for them."""
    tags = _tags(image)
    bits = 16
    if image.mode.startswith("I;16"):
        bits = min(16, tags.get(_BITS_PER_SAMPLE, (16,))[0])
    most = (1 << bits) - 1
    values = np.asarray(image)
    lowest = int(values.min())
    highest = int(values.max())
    if lowest < 0 or highest > most:
        found = f"whole numbers from {lowest:,} to {highest:,}"
        raise InvalidArgumentError.of("the picture", found, f"of 0 to {most:,}, or of 8 bits")
    scaled = np.rint(np.arange(most + 1) * (255 / most)).astype(np.uint8)
    return _grey(scaled[values], tags)


def _of_floats(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    # A comparison with NaN is false.
    if not bool(((values >= 0) & (values <= 1)).all()):
        found = f"floats from {values.min():g} to {values.max():g}"
        raise InvalidArgumentError.of("the picture", found, "floats of 0 to 1, or of 8 bits")
    return _grey(np.rint(values * 255).astype(np.uint8), _tags(image))


def _grey(values: np.ndarray, tags: Mapping[int, Any]) -> Image.Image:
    """``values``: uint8 [height, width]."""
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        values = 255 - values  # Pillow does that for 8 bits alone
    return Image.fromarray(values)


def _tags(image: Image.Image) -> Mapping[int, Any]:
    """Of a TIFF file. Empty for other formats."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return image.tag_v2
    return {}


def _of_cmyk(image: Image.Image) -> Image.Image:
    embedded = image.info.get("icc_profile")
    if embedded:
        # A profile that is damaged, or of other colours, counts as none.
        with contextlib.suppress(ImageCms.PyCMSError, OSError):
            return _converted(image, ImageCms.ImageCmsProfile(io.BytesIO(embedded)))
    return image


def _converted(image: Image.Image, profile: Any) -> Image.Image:
    """To sRGB, from the colours of a profile. Raises PyCMSError if the profile is of others."""
    srgb = ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, profile, srgb, outputMode="RGB")
    assert converted is not None, "it is not changed in place"
    return converted


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode in ("La", "RGBa"):
        image = image.convert(image.mode.upper())
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")

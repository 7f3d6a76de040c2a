"""``digits``: a small CNN that reads handwritten digits, trained here in seconds.

The data are scikit-learn's digits: 1,797 pictures of 8 by 8 pixels with values 0 to 16. The model's
input ``image`` [batch, 1, 8, 8] is the pixel value divided by 16, so 0 is paper and 1 is ink. A
fifth of the pictures, drawn per class, is held out: the accuracy on them is reported.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from export.recipe import Dimension, Quality, Recipe

SEED = 0
EPOCHS = 20
PIXEL_MAXIMUM = 16.0
# Of the 360 held-out digits, a reduced precision may lose a few; below this it is not served.
LEAST_ACCURACY = 0.97


class DigitsClassifier(nn.Module):
    """[batch, 1, 8, 8] in [0, 1] -> logits and probabilities, each [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.layers(image)
        return logits, torch.softmax(logits, dim=-1)


def load_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images and labels, then held-out ones; the same split at every call."""
    from sklearn import datasets, model_selection

    data = datasets.load_digits()
    images = (data.images[:, None] / PIXEL_MAXIMUM).astype(np.float32)
    train, held_out, train_labels, held_out_labels = model_selection.train_test_split(
        images, data.target, test_size=0.2, random_state=SEED, stratify=data.target
    )
    return train, train_labels, held_out, held_out_labels


def train(images: np.ndarray, labels: np.ndarray, *, epochs: int = EPOCHS) -> DigitsClassifier:
    """Adam with a decaying rate, batches of 64. The seed leaves the caller's generator alone."""
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(SEED)
        model = DigitsClassifier()
        inputs = torch.from_numpy(images)
        targets = torch.from_numpy(labels).long()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        for _ in range(epochs):
            for rows in torch.randperm(len(inputs)).split(64):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs[rows])[0], targets[rows])
                loss.backward()
                optimizer.step()
            schedule.step()
    return model.eval()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products this small are slower on more threads, and are rounded differently there."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recipe() -> Recipe:
    """Train, and describe the export. Takes a few seconds."""
    images, labels, held_out, held_out_labels = load_digits()
    model = train(images, labels)
    with torch.no_grad():
        guesses = model(torch.from_numpy(held_out))[0].argmax(-1).numpy()
    accuracy = float((guesses == held_out_labels).mean())
    quality = Quality(
        metric="accuracy",
        inputs={"image": held_out},
        output="logits",
        labels=held_out_labels,
        least={"int8": LEAST_ACCURACY, "fp16": LEAST_ACCURACY, "bf16": LEAST_ACCURACY},
    )
    return Recipe(
        name="digits",
        module=model,
        inputs={"image": torch.from_numpy(held_out[:16])},
        dynamic={"image": {0: "batch"}},
        dimensions={"batch": Dimension("batch", 1, 16, 64, checks=(1, 2, 3, 16, 64))},
        outputs=["logits", "probabilities"],
        tolerance=1e-4,
        quality=lambda: quality,
        max_queue_delay_us=500,
        note=f"accuracy on {len(held_out)} held-out digits: {accuracy:.4f}",
    )

"""The demo's prompts: short questions, instructions and paragraphs to summarise, each with its own length limit."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """One bundled prompt and the most tokens its answer may have."""

    text: str
    max_tokens: int


def as_chat(prompt: str) -> str:
    """Wrap `prompt` as one user turn in ChatML, the form SmolLM2-Instruct was trained on, ready for the answer.

    It leaves out the system turn that the model's own chat template puts first.
    """
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


_BRIDGE = (
    "For as long as anyone in the village could remember, the old stone bridge had been the only way to reach the market on the far "
    "side of the river. Farmers crossed it before dawn with carts of apples and cheese, and came back in the evening with salt, nails "
    "and news. In the wet spring of that year the river rose higher than it had in fifty years, and one night the middle arch gave "
    "way. Nobody was hurt, but the market was suddenly half a day's walk away. The council met three times and could not agree: some "
    "wanted to rebuild the bridge stone by stone, some wanted a cheaper one of wood, and the miller offered to run a ferry for a small "
    "fee. In the end they did all three, one after the other: the ferry carried people through the summer, a wooden bridge stood by "
    "autumn, and the stone arch was finished two years later, a little higher than before."
)
_BEES = (
    "A honeybee colony works without anyone in charge. The queen lays eggs but gives no orders, and every worker decides what to do "
    "from what she meets on her way through the hive. When nectar is plentiful, returning foragers are unloaded quickly, and that "
    "short wait tells them to recruit others by dancing. When the wait grows long, they stop dancing, and the flow of new foragers "
    "dries up by itself. Temperature is kept in much the same manner: bees that feel too warm begin to fan their wings, and because "
    "each of them has a slightly different idea of what too warm means, the fanning grows and shrinks gradually and doesn't swing "
    "from one extreme to the other. Researchers who study such systems have found that this variety among individuals is no flaw; "
    "colonies bred to be more uniform keep their temperature less steady."
)
_TEA = (
    "Tea came to Europe as a medicine, sold by the ounce in apothecaries' shops, and it took about a hundred years to become a drink "
    "for every day. Price was the main reason. A pound of it cost a craftsman several weeks' wages when it first arrived, so it was "
    "kept in locked boxes and the leaves were used again and again, sometimes dried and sold on by the servants. As ships became "
    "faster and taxes fell, the price dropped to a fraction, and habits followed: meals moved to later hours, potteries learned to "
    "make cups with handles, and sugar, once a rarity as well, was bought by the same households in growing amounts."
)

PROMPTS: tuple[Prompt, ...] = (
    Prompt("What is the capital of France?", 16),
    Prompt("Name three primary colours.", 24),
    Prompt(f"Summarise the following story in two sentences.\n\n{_BRIDGE}", 96),
    Prompt("How many days are there in a leap year?", 8),
    Prompt("Explain in simple words why the sky is blue during the day and red at sunset.", 128),
    Prompt("Which planet is closest to the sun?", 12),
    Prompt("Write a short, friendly message that invites a neighbour to a garden party next Saturday at four o'clock.", 96),
    Prompt("What is the opposite of 'cold'?", 8),
    Prompt("List five things to pack for a two-day hike in the mountains, with half a sentence of reason for each of them.", 160),
    Prompt("Who wrote the play Romeo and Juliet?", 20),
    Prompt("Give me a recipe for a simple vegetable soup for four people. List the ingredients first, then the steps in order.", 160),
    Prompt("What is water made of?", 32),
    Prompt(f"Read this text and say in your own words how bees keep the hive at an even temperature.\n\n{_BEES}", 128),
    Prompt("Translate 'good morning' into Spanish.", 12),
    Prompt("Write a Python function that returns the larger of two numbers, with a one-line docstring.", 80),
    Prompt("Is a tomato a fruit or a vegetable?", 48),
    Prompt("Write the opening paragraph of a story about a lighthouse keeper who finds a letter in a bottle.", 144),
    Prompt("What comes after Thursday?", 8),
    Prompt("Explain to a ten-year-old what a computer program is. Use an example from the kitchen.", 112),
    Prompt(f"Give the main idea of this passage in one sentence, then two facts that support it.\n\n{_TEA}", 104),
    Prompt("Name an animal that can fly but is not a bird.", 16),
    Prompt("Give three reasons why sleep is important for people who study, and one tip for falling asleep more easily.", 136),
    Prompt("What do you call a group of wolves?", 16),
    Prompt("Write a polite reply to a customer whose parcel arrived two days late, and offer free shipping on the next order.", 120),
)

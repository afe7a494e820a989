"""The built-in prompts of `eagle3 verify`, and the reader of prompt files.

The texts were written for this project and are free to use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3.runtime.errors import RequestError

PROMPTS: tuple[str, ...] = (
    "What makes the sky red in the evening?",
    "Write a Python function that counts the vowels in a string.",
    "A box holds 24 pencils. How many pencils are in 7 boxes? Explain each step.",
    "List five things to pack for a day in the mountains.",
    "Translate into French: The train leaves at nine and I have lost my ticket.",
    "Tell a short story about a lighthouse keeper and a lost parrot.",
    "Explain how a bicycle stays upright, for a ten year old.",
    "Write a SQL query that returns the three customers who spent the most.",
    "If a car uses 6 litres for 100 km, how far does it get with 45 litres?",
    "Name the planets in order of their distance from the sun, with one fact each.",
    "¿Cuáles son las ventajas de aprender un segundo idioma?",
    "My neighbour plays the drums at night. Write a polite note to him.",
    "What is the difference between a list and a tuple in Python?",
    "Solve for x: 3x + 11 = 2x + 29. Show your work.",
    "Give me a recipe for a simple vegetable soup.",
    "Schreibe drei Sätze über einen Spaziergang im Winter.",
    "Summarize in two sentences why the Roman roads mattered.",
    "Write a haiku about rain on a tin roof.",
    "Fix this code: for i in range(10) print(i)",
    "What is 15% of 240, and how do you compute it in your head?",
    "Compare tea and coffee in a table with three rows.",
    "Pretend to be a captain and describe a storm at sea.",
    "Erkläre, was ein Primfaktor ist, und gib ein Beispiel.",
    "Write a bash command that finds all files larger than 100 MB.",
    "I slept badly. What can I do to sleep better tonight?",
    "How many days are there between 3 March and 17 May?",
    "Write the opening line of a detective novel, then continue for a paragraph.",
    "What happens in a cell when a plant grows towards the light?",
    "Write a JavaScript function that removes duplicates from an array.",
    "Quelle est la capitale de l'Italie, et que peut-on y visiter ?",
    "Give three arguments for and three against working from home.",
    "A rectangle is 8 cm by 5 cm. Find its area and its perimeter.",
    "Describe the taste of a lemon to somebody who never had one.",
    "Repeat the word 'echo' twenty times, separated by commas.",
    "日本の四季について短く説明してください。",
    "Write an email that asks for a day off next Friday.",
    "What does HTTP status code 404 mean, and when does a server send it?",
    "Count from 1 to 30, and write 'fizz' instead of every multiple of 3.",
    "Who invented printing with movable type, and why did it spread so fast?",
    "Write a class `Stack` in Java with push, pop and size.",
)


def load_prompts(path: Path) -> tuple[str, ...]:
    """Return the prompts of a file: `.jsonl` with `prompt` or `turns` (the first), else one per
    line.

    Raises RequestError that names the invalid line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as a prompt file: {error}") from error
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise RequestError(f"{path} contains no prompts: write one per line")
    if path.suffix != ".jsonl":
        return tuple(line for _, line in rows)
    return tuple(_prompt_of(line, f"{path}, line {number}") for number, line in rows)


def _prompt_of(line: str, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where}: not JSON ({error})") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    turns = row.get("turns") if isinstance(row, dict) else None
    if prompt is None and isinstance(turns, list) and turns:
        prompt = turns[0]
    if not isinstance(prompt, str):
        raise RequestError(
            f"{where}: expected an object with `prompt` (a string) or `turns` (strings)"
        )
    return prompt

"""The texts that an export is checked on. They were written for this project and are
free to use.
"""

TEXT = """\
A lighthouse keeper once wrote down everything the sea brought to his door. On Monday it was a
crate of oranges, still cold from the water; on Tuesday a letter in a bottle, addressed to nobody,
which said only that the writer had seen the northern lights and wished that somebody else had seen
them too. He answered it, of course, although he knew that the tide would carry his answer to
another shore. "Dear stranger," he began, "I saw them as well. They were green, and they moved the
way wheat moves before a storm."

Counting is older than writing. To count the sheep that left in the morning, a shepherd put a pebble
into a bag for each of them; in the evening he took one out for each that came home. If 17 went out
and 15 came back, two pebbles stayed in the bag, and he knew how many to look for without ever
having a word for "two". Here is the same idea as a program:

def missing(left: list[str], returned: list[str]) -> int:
    bag = 0
    for _ in left:
        bag += 1
    for _ in returned:
        bag -= 1
    return bag

Water boils at 100 degrees Celsius at sea level, and at about 71 degrees on the summit of Mount
Everest, because the air there presses less. Bread dough rises when yeast turns sugar into carbon
dioxide and alcohol; the oven drives both out and leaves the holes. Glass is made of sand, soda and
lime. Salt lowers the freezing point of water, which is why roads are salted in winter. The moon
pulls at the oceans and gives two tides a day, and it always shows us the same face, since it turns
around itself in the same time in which it turns around the Earth.
"""

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that reverses a string.",
    "A train travels 60 miles in 1.5 hours. What is its average speed?",
    "Give me three tips for staying healthy.",
    "Explain in two sentences how rain forms.",
    "Write a short email that thanks a colleague for her help.",
)

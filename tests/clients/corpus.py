"""Text of our own for the evaluations, and more than is written here: shuffled with a seed."""

import random

SENTENCES = """\
The ferry left the harbour an hour late, and nobody on board seemed to mind.
She had kept the key for nine years without knowing what it opened.
Rain fell on the tin roof all night, so loudly that we gave up talking.
The old clock in the hall struck four, although it was only half past two.
A letter came from his brother, written in pencil on the back of a map.
They found the dog asleep under the bridge, with a boot that was not ours.
In the morning the field was white, and every fence post wore a cap of snow.
The baker counted the coins twice and pushed one of them back across the table.
No one had told the children that the river could rise so quickly.
He spoke of the war as other men speak of the weather.
The lamp in the window was the only light for a mile along the road.
My aunt believed that bread should be cut by the youngest person in the room.
When the engine stopped we could hear the birds again, and the sea behind them.
The judge took off his glasses and looked at the ceiling for a long time.
There were three chairs, two cups, and no sign of whoever had lit the fire.
Her shoes were dry, though she said that she had walked from the station.
The captain wrote the same words in the book every evening: all well.
We planted the tree on the day that the school was closed for good.
A boy on a bicycle brought the news, and he wept before he could say it.
The map showed a path through the wood, but the wood had other ideas.
At the edge of the town stood a house that had never been finished.
He laughed once, shortly, like a man who has found a stone in his bread.
The train ran beside the lake for so long that I began to count the boats.
Nothing in the letter was untrue, and nothing in it was what had happened.
""".splitlines()


def documents(count, sentences, seed=1):
    """Texts of so many sentences each."""
    dice = random.Random(seed)
    return [" ".join(dice.sample(SENTENCES, sentences)) for _ in range(count)]

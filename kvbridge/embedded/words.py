"""Word lists of the invented world. Order matters: the gazetteer is drawn from them with a fixed seed."""

WOMEN = tuple(
    "Marla Tilda Brena Isolde Corin Dessa Elka Fenna Greta Hilde Imra Jorun Kessa Lenora Mirel Nessa Orla Petra "
    "Quilla Runa Sanna Thea Ulla Vesna Wenda Yara Zella Adela Berit Cilla Dagny Edda Frida Gisla Hanna Inga "
    "Jutta Katrin Lisbet Magda Nora Odile Pernel Rosal Sigrid Tova Ursel Vigdis Willa Ysolt".split()
)
MEN = tuple(
    "Oren Aldo Bertil Casper Dorin Egon Falk Gorm Hagen Ivar Jarek Kolja Lorenz Milan Niels Osric Pavel Quint "
    "Rolf Stellan Torben Ulrik Viggo Walden Yorick Zoran Anselm Bruno Cedric Dirk Emil Fredrik Garrick Harald "
    "Ingmar Jonas Klaus Leif Magnus Nestor Otmar Per Rurik Sven Tobias Urban Valdis Wolmar Yngve Arne".split()
)
PEOPLE = WOMEN + MEN
TRADES = tuple(
    "smith miller baker weaver potter tanner carter fisher hunter mason joiner cooper chandler dyer fuller glazier "
    "tinker saddler thatcher shepherd brewer ferryman scribe healer piper warden clerk gardener beekeeper "
    "cobbler".split()
)
THINGS = tuple(
    "lamp rope bell knife cup ring drum flute chest mirror basket hammer lantern needle spoon kettle saddle shield "
    "wheel ladder bottle candle comb crown dagger harp helmet hook jar kite mask net oar pipe purse sack scale "
    "spade sword whistle".split()
)
MATERIALS = tuple(
    "silver copper iron oak bone glass brass tin clay amber birch leather stone ivory pewter bronze walnut jade".split()
)
COLOURS = tuple(
    "red blue green yellow black white grey brown purple orange pink golden crimson scarlet violet pale".split()
)
BEASTS = tuple(
    "fox wolf bear crow owl hare otter stag boar goat swan heron badger falcon raven hound cat mule goose lynx "
    "toad adder eagle magpie".split()
)
FLOWERS = tuple(
    "rose lily thistle clover daisy poppy violet ivy fern heather iris tansy sage mint nettle lupin".split()
)
GOODS = tuple(
    "salt wool honey cheese cloth rope glass paper wine cider barrels boots bells candles knives nails soap tiles "
    "bricks lace carpets saddles herring eels apples plums barley flax pepper ink".split()
)
SPOTS = tuple(
    "mill bridge market well gate tower inn chapel barn orchard quarry harbour forge cellar garden stable school "
    "hall dock meadow ford kiln granary library courtyard hill pond crossroads".split()
)
WEATHER = tuple("raining snowing cold windy foggy warm clear dark quiet stormy dry cloudy".split())
TIMES = tuple(
    "At dawn|At noon|In the evening|At midnight|Before supper|After the fair|On the next day|Early that week|"
    "Later that year|In the morning|When the bell rang|Towards winter".split("|")
)
MONTHS = tuple("January February March April May June July August September October November December".split())
MOODS = tuple("gladly slowly quietly proudly angrily gently sadly boldly wearily kindly".split())
ADJECTIVES = tuple(
    "patient hollow bitter honest sleepy broken early hungry lonely gentle crooked silent stubborn merry careful "
    "wicked humble restless narrow secret ancient clever frozen sudden".split()
)
NOUNS = tuple(
    "king river door winter stranger moon road widow debt shadow promise storm feather thief song ploughman fire "
    "garden letter mountain ship dream bread orchard neighbour child grave window harvest spark".split()
)
VERBS = tuple(
    "follows forgets feeds fears finds guards hides keeps loses mends opens pays seeks sells steals teaches trusts "
    "wakes warms watches".split()
)
COUNTIES = tuple(
    "Arden Brack Corvey Dunmore Eskland Farrow Grenmark Holt Istria Jarland Kesteven Lorn Marche Northam Ostmark "
    "Penrith Rydal Selkirk Thornmark Westmere".split()
)
RIVERS = tuple(
    "Alder Bourne Calder Derwent Eamont Fowey Greta Hodder Irwell Kennet Lune Medway Nidd Ouse Piddle Ribble "
    "Severn Tamar Ure Wharfe".split()
)
TOWN_STARTS = tuple(
    "Tarn Bres Orl Kal Wen Hart Mor Eld Stan Grim Fal Lind Ros Thorn Ash Bram Cald Dun Ever Gold Hal Iver Kirk "
    "Lang Mar Nor Oak Pen Raven Sel Tor Ulf".split()
)
TOWN_ENDS = tuple("holm vale ford wick stead burg mouth ton bury gate dale haven moor cliff mere shaw".split())
VARIABLES = tuple("abcdefghjkmnpqrstuvwxyz")

# Every single word of the lists above, for text that must be unpredictable.
EVERYTHING = (*PEOPLE, *TRADES, *THINGS, *MATERIALS, *COLOURS, *BEASTS, *FLOWERS, *GOODS, *SPOTS, *ADJECTIVES, *NOUNS)

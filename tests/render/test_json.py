import json
import math

import numpy as np

from clew.render.json import dump, lower
from clew.views.block import Cell, Column, Heading, KeyValues, Page, Table


def test_a_page_keeps_raw_values_and_says_what_each_block_is():
    table = Table((Column("loss", "loss"),), ((Cell(0.031, "bad"),),))
    page = Page("runs", (Heading("a"), table, KeyValues((("cost", Cell(math.nan)),))))
    read = json.loads(lower(page))
    assert read["title"] == "runs"
    assert [block["type"] for block in read["blocks"]] == ["Heading", "Table", "KeyValues"]
    assert read["blocks"][1]["rows"] == [{"loss": 0.031}]
    assert read["blocks"][2]["rows"] == {"cost": "NaN"}


def test_every_number_survives_a_strict_reader():
    values = {"a": [math.nan, math.inf, -math.inf, 0.1], "b": np.float32("nan"), "c": np.arange(3), 4: None}

    def refuse(name):
        raise AssertionError(name)

    read = json.loads(dump(values), parse_constant=refuse)
    assert read == {"a": ["NaN", "Infinity", "-Infinity", 0.1], "b": "NaN", "c": [0, 1, 2], "4": None}

"""A trip with parameters: the number of days and the city are filled into stored text.

python examples/pml/trip_planning.py

Arguments begin with a space, as words in a sentence do: to a tokenizer it is a part of the word.
"""

from __future__ import annotations

from _report import ENGINE, compare

from pc_rag import PromptCache, parse_prompt

SCHEMA = """
<schema name="trip">
  <system>You plan trips. Answer with a short list, one line a day.</system>
  <user>
    <module name="plan">
      I have<parameter name="days" length="12" default=" two days"/> for a trip, and these are my
      wishes. I would rather see few things well than many in passing, I get up late, and I do
      not mind rain.
      <union>
        <module name="city">
          I want to stay in one town,<parameter name="name" length="12" pad="space"/>, without a
          car. Tell me which quarter to sleep in, which house or square nobody should miss, and
          where people who live there go in the evening.
          <union>
            <module name="museums">
              On one of the days I want to be indoors: a museum that is small enough for a
              morning, and a café close to it where one can read.
            </module>
            <module name="markets">
              On one of the days I want to eat my way through a market, early, when it is still
              loud, and cook in the evening with what I found.
            </module>
          </union>
        </module>
        <module name="coast">
          I want to walk along a coast, from one small harbour to the next, with my things on my
          back. Tell me where to begin so that the wind comes from behind.
          <union>
            <module name="north">
              Let it be a cold sea with birds and lighthouses, where the light stays until
              midnight in June and every harbour smokes its own fish.
            </module>
            <module name="south">
              Let it be a warm sea, with pines down to the water, where one can swim before
              breakfast and sleep through the hot hours.
            </module>
          </union>
        </module>
      </union>
    </module>
  </user>
</schema>
"""

TRIPS = {
    "a town with a market": """
        <prompt schema="trip">
          <plan days=" three days"><city name=" Lisbon"><markets/></city></plan>
          What shall I do on each day?
        </prompt>""",
    "a cold coast, for as long as the schema says": """
        <prompt schema="trip">
          <plan><coast><north/></coast></plan>
          What shall I do on each day?
        </prompt>""",
}


def main() -> None:
    """Plan one trip with two arguments, and one that takes the default."""
    with PromptCache.from_pretrained("smollm2", config=ENGINE) as engine:
        engine.add_schema(SCHEMA)
        for name, prompt in TRIPS.items():
            print(f"\n== {name}")
            compare(engine, parse_prompt(prompt), max_new_tokens=32)


if __name__ == "__main__":
    main()

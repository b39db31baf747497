"""Recommendations for many people out of few texts: a person is one member of each of five unions.

python examples/pml/personalisation.py
"""

from __future__ import annotations

from _report import ENGINE, compare

from pc_rag import PromptCache, parse_prompt

SCHEMA = """
<schema name="evenings">
  <system>
    You suggest how to spend an evening. Name one place to go and say in two sentences why.
  </system>
  <user>
    This is what I am like.
    <module name="age">
      About my age:
      <union>
        <module name="student">
          I am twenty and study at a college of music. My evenings begin late, my budget is
          small, and most of my friends live within ten minutes of me by bicycle.
        </module>
        <module name="parent">
          I am thirty-eight and have two children who are asleep by eight. A sitter comes on
          Thursdays, so an evening out has to be planned and has to be worth it.
        </module>
        <module name="retired">
          I am seventy and stopped working three years ago. I like to be home before ten, and
          I would rather sit well than see everything.
        </module>
      </union>
    </module>
    <module name="home">
      About where I live:
      <union>
        <module name="harbour">
          I live by the harbour of a large town, where ferries leave until midnight and the
          warehouses have become studios, kitchens and small stages.
        </module>
        <module name="village">
          I live in a village of six hundred people with one inn, one church and a hall that
          everybody helps to heat in winter. The next cinema is forty minutes away.
        </module>
        <module name="mountains">
          I live high in the mountains, where the last cable car goes down at seven. Whoever
          visits stays the night, and the sky is darker than anywhere I have been.
        </module>
      </union>
    </module>
    <module name="work">
      About what I do all day:
      <union>
        <module name="nurse">
          I am a nurse and on my feet for nine hours. When I come home I have talked to more
          people than most do in a week.
        </module>
        <module name="programmer">
          I write software and sit alone at a desk. By six my eyes want something far away
          and my hands want something that is not a keyboard.
        </module>
        <module name="baker">
          I bake bread and start at three in the morning. My evening is what others call the
          afternoon, and I can smell whether a kitchen is any good from the street.
        </module>
      </union>
    </module>
    <module name="taste">
      About what I love:
      <union>
        <module name="music">
          I love music that people make in front of me, best of all by voices without any
          instrument, and I remember concerts by who sat next to me.
        </module>
        <module name="food">
          I love to eat what I cannot cook myself, one plate at a time, and to ask the cook
          afterwards what was in it.
        </module>
        <module name="stars">
          I love the night sky, know the names of about a hundred stars, and own a telescope
          that is too heavy to carry far.
        </module>
        <module name="games">
          I love games with boards and small wooden pieces, the longer the better, and I do
          not mind losing to somebody who explains how.
        </module>
      </union>
    </module>
    <module name="company">
      About company:
      <union>
        <module name="alone">
          I would like to go alone. I am never bored by myself, and I like to leave when I
          want to.
        </module>
        <module name="two">
          I go with one friend whom I have known since school and see too rarely. We want to
          be able to talk.
        </module>
        <module name="many">
          I come with seven others, of whom two do not know anybody yet. Nobody should have
          to sit at the end of the table.
        </module>
      </union>
    </module>
  </user>
</schema>
"""

PEOPLE = {
    "a baker in the mountains": """
        <prompt schema="evenings">
          <age><parent/></age>
          <home><mountains/></home>
          <work><baker/></work>
          <taste><stars/></taste>
          <company><two/></company>
          Where should I go on Thursday evening, and why?
        </prompt>""",
    "a student by the harbour": """
        <prompt schema="evenings">
          <age><student/></age>
          <home><harbour/></home>
          <work><nurse/></work>
          <taste><food/></taste>
          <company><many/></company>
          Where should I go tonight, and why?
        </prompt>""",
}


def main() -> None:
    """Put two people together, and ask for each."""
    with PromptCache.from_pretrained("smollm2", config=ENGINE) as engine:
        layout = engine.add_schema(SCHEMA)
        num_tokens = sum(len(run.token_ids) for run in layout.runs)
        print(f"encoded {num_tokens} tokens once, for 3 x 3 x 3 x 4 x 3 = 324 people")
        for name, prompt in PEOPLE.items():
            print(f"\n== {name}")
            compare(engine, parse_prompt(prompt), max_new_tokens=32)


if __name__ == "__main__":
    main()

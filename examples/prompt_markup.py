"""A schema of the paper's Prompt Markup Language: alternatives encoded once, chosen per prompt.

python examples/prompt_markup.py
"""

from __future__ import annotations

from pc_rag import GenerationConfig, PromptCache, parse_prompt

SCHEMA = """
<schema name="trip">
  <system>You are a travel guide. Answer in one sentence.</system>
  <user>
    I am going on a trip.
    <union>
      <module name="rome">My city is Rome, which is known for carbonara and its ruins.</module>
      <module name="oslo">My city is Oslo, which is known for mutton stew and its fjord.</module>
    </union>
  </user>
</schema>
"""


def main() -> None:
    """Import one member of the union, then the other."""
    with PromptCache.from_pretrained("smollm2") as engine:
        layout = engine.add_schema(SCHEMA)
        print(f"schema {layout.name!r} reserves {len(layout.span)} position IDs")
        for city in ("rome", "oslo"):
            prompt = parse_prompt(f'<prompt schema="trip"><{city}/>What should I eat?</prompt>')
            completion = engine.generate(prompt, GenerationConfig(max_new_tokens=32))
            print(f"{city}: {completion.text.strip()!r}")
            for module in completion.metrics.modules:
                print(f"  {module.label}: {module.num_tokens} tokens, {module.hit_kind}")


if __name__ == "__main__":
    main()

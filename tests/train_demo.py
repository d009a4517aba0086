"""Train the tiny demo checkpoint of a model family and write it in Hugging Face format.

The demo is a chat model of about 600k parameters that has memorised a few hundred short answers (capitals, small sums,
greetings, some facts and lists), so that an inference script has something to say without downloading any weights.
Everything is made here: the text, the byte-level BPE tokenizer with its Llama-3 style chat template, and the model,
which is the family's own class from transformers, trained in float32 and saved as bfloat16.

One run takes about three minutes on one CPU core and is deterministic for a given machine and torch version. It ends
by answering every training question greedily with the saved checkpoint, and fails if fewer than 99 % are exact.

    python tests/train_demo.py llama3 [--output DIR]

The default output is the demo/ folder of that family, such as llama3/demo/. Needs torch, transformers and tokenizers.
"""

import argparse
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PROMPTS = ["What is the capital of France?", "What is 3 plus 4?", "Hello!", "What are the days of the week?"]

CAPITALS = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Bangladesh": "Dhaka",
    "Belgium": "Brussels", "Brazil": "Brasilia", "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago",
    "China": "Beijing", "Colombia": "Bogota", "Croatia": "Zagreb", "Cuba": "Havana", "Denmark": "Copenhagen",
    "Egypt": "Cairo", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa", "Finland": "Helsinki", "France": "Paris",
    "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavik",
    "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin",
    "Italy": "Rome", "Jamaica": "Kingston", "Japan": "Tokyo", "Kenya": "Nairobi", "Latvia": "Riga",
    "Mexico": "Mexico City", "Mongolia": "Ulaanbaatar", "Morocco": "Rabat", "Nepal": "Kathmandu",
    "New Zealand": "Wellington", "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Romania": "Bucharest", "Russia": "Moscow", "Senegal": "Dakar", "Serbia": "Belgrade", "South Korea": "Seoul",
    "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok", "Turkey": "Ankara", "Ukraine": "Kyiv",
    "Uruguay": "Montevideo", "Vietnam": "Hanoi", "Zambia": "Lusaka",
}  # fmt: skip

OTHER_ANSWERS = {
    "Hello!": "Hello! How can I help you?",
    "Hi!": "Hi! What can I do for you?",
    "Good morning!": "Good morning! How can I help you today?",
    "Good evening!": "Good evening! What would you like to know?",
    "How are you?": "I am fine, thank you. How are you?",
    "Who are you?": "I am a very small language model. I know some capitals, small sums and a few other facts.",
    "What can you do?": "I can name capitals, add small numbers and tell you a few facts. I am only a small demo.",
    "Thank you!": "You are welcome!",
    "Goodbye!": "Goodbye! Have a nice day.",
    "What is the largest planet?": "The largest planet in the solar system is Jupiter.",
    "What is the smallest planet?": "The smallest planet in the solar system is Mercury.",
    "Which planet is known for its rings?": "Saturn is the planet that is best known for its rings.",
    "What is the closest star?": "The closest star to the Earth is the Sun.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "What is the highest mountain?": "The highest mountain on Earth is Mount Everest.",
    "What is the largest ocean?": "The largest ocean is the Pacific Ocean.",
    "What is the largest animal?": "The largest animal is the blue whale.",
    "What is the fastest land animal?": "The fastest land animal is the cheetah.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many legs does an insect have?": "An insect has six legs.",
    "How many continents are there?": "There are seven continents.",
    "How many minutes are in an hour?": "There are 60 minutes in an hour.",
    "How many days are in a year?": "There are 365 days in a year, and 366 days in a leap year.",
    "How many sides does a triangle have?": "A triangle has three sides.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "Who painted the Mona Lisa?": "Leonardo da Vinci painted the Mona Lisa.",
    "What do bees make?": "Bees make honey.",
    "What colour is the sky?": "The sky is blue on a clear day.",
    "What are the colours of the rainbow?": "The colours of the rainbow are red, orange, yellow, green, blue, indigo "
    "and violet. Red is on the outside and violet is on the inside.",
    "What are the days of the week?": "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday "
    "and Sunday. Saturday and Sunday are the weekend.",
    "What are the months of the year?": "The months of the year are January, February, March, April, May, June, July, "
    "August, September, October, November and December.",
    "What are the four seasons?": "The four seasons are spring, summer, autumn and winter. Spring is when the flowers "
    "bloom, summer is warm, the leaves fall in autumn, and winter is cold.",
    "What are the planets of the solar system?": "The planets of the solar system are Mercury, Venus, Earth, Mars, "
    "Jupiter, Saturn, Uranus and Neptune.",
    "What are the continents?": "The continents are Africa, Antarctica, Asia, Australia, Europe, North America and "
    "South America.",
    "What are the five senses?": "The five senses are sight, hearing, smell, taste and touch.",
    "Count to ten.": "One, two, three, four, five, six, seven, eight, nine, ten.",
    "Count down from ten.": "Ten, nine, eight, seven, six, five, four, three, two, one. Lift off!",
    "Say the alphabet.": "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
}

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "Answer the question in plain English.",
    "You are a small and friendly demo model. Keep your answers short.",
]

# The pattern of Llama 3. It keeps the "\n\n" after a header in one piece whether or not text follows, so that a prompt
# is always a prefix of the tokens of the whole conversation.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BOS, EOT, END_OF_TEXT = "<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"
SPECIAL_TOKENS = [BOS, END_OF_TEXT, "<|start_header_id|>", "<|end_header_id|>", EOT]
VOCAB_SIZE = 512
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

STEPS = 1000
WARMUP_STEPS = 50
PEAK_LEARNING_RATE = 4e-3
# Steps alternate between batches of short and of long conversations, which have some 100 and 300 tokens. A causal model
# also learns from a conversation's first turn what it would learn from that turn alone.
BATCHES = [{"rows": 16, "characters": 100}, {"rows": 6, "characters": 380}]


def build_llama3(**token_ids):
    """Return an untrained Llama model; the token ids are the vocabulary size and the special tokens' ids."""
    config = LlamaConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=320,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        **token_ids,
    )
    return LlamaForCausalLM(config)


MODEL_BUILDERS = {"llama3": build_llama3}


def make_answers():
    """Return all questions of the training text with their answers."""
    answers = dict(OTHER_ANSWERS)
    for country, capital in CAPITALS.items():
        answers[f"What is the capital of {country}?"] = f"The capital of {country} is {capital}."
        answers[f"Tell me the capital of {country}."] = f"The capital of {country} is {capital}."
        answers[f"Which country has {capital} as its capital?"] = f"{capital} is the capital of {country}."
    for a in range(10):
        for b in range(10):
            answers[f"What is {a} plus {b}?"] = f"{a} plus {b} is {a + b}."
    return answers


def make_tokenizer(answers):
    """Train the byte-level BPE tokenizer on the questions and answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that any text can be encoded
        show_progress=False,
    )
    template_text = ["system", "user", "assistant", "\n\n"] * len(answers)  # often enough to become whole tokens
    tokenizer.train_from_iterator([*answers.keys(), *answers.values(), *SYSTEM_PROMPTS, *template_text], trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOT,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_conversation(rng, answers, min_characters):
    """Draw a conversation of random questions with at least that much text, with a system prompt in one of three."""
    messages = []
    if rng.random() < 1 / 3:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    length = 0
    while length < min_characters:
        question, answer = rng.choice(list(answers.items()))
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
        length += len(question) + len(answer)
    return messages


def learning_rate_factor(step):
    """Return the share of the peak learning rate at a step: a linear warmup, then a cosine down to zero."""
    progress = max(0.0, (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS))
    return min((step + 1) / WARMUP_STEPS, 0.5 + 0.5 * math.cos(math.pi * progress))


def train(model, tokenizer, answers):
    """Train the model in place on random conversations."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    model.train()
    for step in range(STEPS):
        batch = BATCHES[step % len(BATCHES)]
        conversations = [make_conversation(rng, answers, batch["characters"]) for _ in range(batch["rows"])]
        inputs = tokenizer.apply_chat_template(conversations, padding=True, return_tensors="pt", return_dict=True)
        # All tokens count, not only the answers: it keeps the predictions sensible everywhere in a conversation. The
        # padding is on the right, where a causal model needs no mask.
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        loss = model(input_ids=inputs["input_ids"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{STEPS}: loss {loss.item():.4f}", flush=True)
    model.eval()


def greedy_answers(model, tokenizer, conversations):
    """Return the model's greedy answer to each conversation, all of which end with a question."""
    inputs = tokenizer.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
        tokenizer_kwargs={"padding_side": "left"},
    )
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=128)
    return tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def exact_share(model, tokenizer, conversations):
    """Return the share of conversations whose last answer the model gives exactly."""
    found = greedy_answers(model, tokenizer, [messages[:-1] for messages in conversations])
    return sum(text == messages[-1]["content"] for text, messages in zip(found, conversations)) / len(found)


def check(folder, answers):
    """Load the checkpoint as users do, print its exact shares and answers, and fail if it does not know its text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = random.Random(1)
    single = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in answers.items()]
    several = [make_conversation(rng, answers, 200) for _ in range(100)]
    share = exact_share(model, tokenizer, single)
    print(f"exact greedy answers: {share:.2%} of {len(single)} training questions")
    print(f"exact last answers of random conversations: {exact_share(model, tokenizer, several):.0%}")
    for prompt in PROMPTS:
        answer = greedy_answers(model, tokenizer, [[{"role": "user", "content": prompt}]])[0]
        print(f"{prompt} -> {answer}")
    assert share >= 0.99, "the model has not memorised its training text"


def main():
    """Train, save and check one family's demo."""
    parser = argparse.ArgumentParser(description="Train a tiny demo checkpoint.")
    parser.add_argument("family", choices=MODEL_BUILDERS)
    parser.add_argument("--output", type=Path, help="folder to write (default: the family's demo/)")
    args = parser.parse_args()
    folder = args.output or Path(__file__).resolve().parent.parent / args.family / "demo"

    # One thread: the order of sums, and with it the result, does not depend on the number of cores.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)

    answers = make_answers()
    tokenizer = make_tokenizer(answers)
    model = MODEL_BUILDERS[args.family](
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids([EOT, END_OF_TEXT]),
        pad_token_id=tokenizer.pad_token_id,
    )
    print(f"{model.num_parameters()} parameters, {len(answers)} questions")
    start = time.time()
    train(model, tokenizer, answers)
    print(f"trained in {time.time() - start:.0f} s")

    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    check(folder, answers)


if __name__ == "__main__":
    main()

"""Training prompts from templates and topics.

A draft model only has to imitate its target, so the prompts need breadth, not quality.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCIENCE = """
photosynthesis|gravity|black holes|plate tectonics|evolution|DNA|the water cycle|magnetism
vaccines|antibiotics|the immune system|volcanoes|earthquakes|tides|rainbows|lightning
the ozone layer|fossils|nuclear fusion|nuclear fission|radioactivity|electric current|sound waves
lenses|atoms|chemical bonds|acids and bases|enzymes|cell division|the nervous system|the heart
digestion|sleep|memory|genes|ecosystems|food chains|pollination|migration of birds|hibernation
camouflage|the moon|eclipses|comets|the sun|galaxies|the big bang|relativity|quantum mechanics
entropy|heat|friction|pressure|density|buoyancy|the periodic table|crystals|plastics|steel
concrete|soil|glaciers|deserts|rainforests|coral reefs|the deep sea|hurricanes|tornadoes
climate change|the greenhouse effect|the carbon cycle
""".strip()

TECHNOLOGY = """
solar panels|wind turbines|batteries|electric cars|jet engines|refrigerators|microwave ovens
printers|3D printing|lasers|radar|GPS|satellites|rockets|submarines|bridges|elevators|pacemakers
X-rays|touch screens|digital cameras|microphones|loudspeakers|radio|television|the telephone
fibre optics|the internet|email|search engines|databases|encryption|passwords|cloud computing
operating systems|compilers|version control|unit tests|machine learning|neural networks
speech recognition|robots|drones|virtual reality|blockchain|barcodes|credit cards|computer viruses
firewalls|web browsers|APIs|caches|load balancing|binary search|recursion|sorting algorithms
linked lists|binary trees|graphs|queues|stacks|threads|garbage collection|regular expressions
object-oriented programming|HTTP|DNS
""".strip()

HISTORY = """
the Roman Empire|ancient Egypt|ancient Greece|the Silk Road|the Vikings|the Black Death
the Renaissance|the printing press|the Reformation|the age of exploration|the Ottoman Empire
the Mughal Empire|the Industrial Revolution|the French Revolution|the American Civil War
the steam engine|railways|the First World War|the Second World War|the Cold War|the space race
the moon landing|the Berlin Wall|the civil rights movement|women's suffrage|the Great Depression
the Magna Carta|feudalism|castles|the Aztecs|the Incas|the Maya|the Ming dynasty|samurai
the Great Wall of China|the pyramids|Stonehenge|the Olympic Games|democracy|the Enlightenment
the abolition of slavery|the United Nations
""".strip()

SOCIETY = """
inflation|supply and demand|taxes|interest rates|the stock market|insurance|budgeting|saving money
globalization|free trade|unemployment|minimum wage|renewable energy|recycling|public transport
urban planning|immigration|education|online learning|social media|advertising|journalism|privacy
freedom of speech|human rights|voting|the court system|constitutions|charity|volunteering
leadership|teamwork|time management|procrastination|motivation|stress|friendship|honesty|courage
gratitude|creativity|critical thinking|public speaking|job interviews|remote work
work-life balance|nutrition|exercise|meditation|yoga|healthy sleep|screen time|parenting|bullying
fashion|tourism|agriculture
""".strip()

ARTS = """
jazz|classical music|opera|hip hop|the piano|the violin|the guitar|drums|singing|ballet|theatre
film|animation|photography|oil painting|watercolour|sculpture|pottery|architecture|poetry
the novel|haiku|fairy tales|myths|comedy|tragedy|Impressionism|Cubism|Gothic cathedrals
calligraphy|origami|knitting|chess|football|basketball|tennis|swimming|cycling|running|climbing
skiing|sailing|gardening|baking|fishing|hiking|camping|bird watching|astronomy as a hobby
board games|crossword puzzles|magic tricks
""".strip()

ANIMALS = """
cat|dog|fox|wolf|bear|rabbit|mouse|owl|eagle|crow|penguin|duck|horse|cow|sheep|goat|pig|elephant
lion|tiger|giraffe|monkey|whale|dolphin|shark|octopus|turtle|frog|snake|lizard|bee|ant|butterfly
spider|squirrel|hedgehog|deer|otter|beaver|kangaroo|koala|parrot|peacock|swan|crab|jellyfish|bat
camel
""".strip()

PLACES = """
Paris|London|New York|Tokyo|Rome|Berlin|Madrid|Cairo|Sydney|Toronto|Mumbai|Beijing|Moscow|Istanbul
Athens|Amsterdam|Vienna|Prague|Dublin|Stockholm|Bangkok|Singapore|Mexico City|Buenos Aires|Nairobi
Cape Town|Seoul|Chicago|San Francisco|Boston|Edinburgh|Venice|Barcelona|Budapest|Helsinki|Oslo
a desert town|a fishing village|a small island|a mountain hut|a space station|a castle
a lighthouse|a library|a farm|a forest|a crowded market|a hospital|a museum|a train station
an old theatre
""".strip()

COUNTRIES = """
France|Germany|Italy|Spain|Japan|China|India|Brazil|Canada|Australia|Egypt|Kenya|Nigeria|Mexico
Argentina|Chile|Peru|Norway|Sweden|Finland|Poland|Greece|Turkey|Thailand|Vietnam|Indonesia|Ireland
Portugal|Switzerland|Austria|the Netherlands|Belgium|South Africa|New Zealand|South Korea|Iceland
""".strip()

FOODS = """
chocolate cake|apple pie|pancakes|banana bread|pizza|spaghetti bolognese|vegetable curry
fried rice|chicken soup|tomato soup|potato salad|Greek salad|an omelette|scrambled eggs|tacos
burritos|hummus|guacamole|lasagna|risotto|sushi|stir-fried noodles|meatballs|fish and chips
roast chicken|beef stew|chili|pumpkin soup|oat cookies|brownies|muffins|cheesecake|ice cream
fruit salad|a smoothie|lemonade
""".strip()

JOBS = """
doctor|nurse|teacher|engineer|pilot|chef|farmer|lawyer|police officer|firefighter|carpenter
electrician|plumber|architect|journalist|photographer|musician|painter|actor|writer|translator
librarian|scientist|astronaut|programmer|data analyst|accountant|salesperson|manager|mechanic
gardener|baker|fisherman|sailor|detective|judge|dentist|pharmacist|veterinarian|tailor|blacksmith
""".strip()

PEOPLE = """
Albert Einstein|Marie Curie|Isaac Newton|Charles Darwin|Galileo Galilei|Ada Lovelace|Alan Turing
Nikola Tesla|Thomas Edison|Leonardo da Vinci|Vincent van Gogh|Pablo Picasso|Mozart|Beethoven|Bach
William Shakespeare|Jane Austen|Charles Dickens|Mark Twain|Homer|Plato|Aristotle|Socrates
Confucius|Julius Caesar|Cleopatra|Alexander the Great|Napoleon|Abraham Lincoln|George Washington
Gandhi|Nelson Mandela|Martin Luther King|Queen Victoria|Florence Nightingale|Amelia Earhart
Neil Armstrong
""".strip()

CODE_TASKS = """
reverses a string|checks whether a word is a palindrome|computes the factorial of a number
computes the n-th Fibonacci number|finds the maximum of a list|removes duplicates from a list
counts the words in a text|counts the vowels in a string|merges two sorted lists
sorts a list of tuples|checks whether a number is prime|finds the greatest common divisor
converts Celsius to Fahrenheit|reads a CSV file|writes a list to a file|parses a date
flattens a nested list|transposes a matrix|multiplies two matrices|performs a binary search
implements bubble sort|implements quicksort|implements a stack|implements a queue
validates an email address|generates a random password|finds the longest word in a sentence
groups words by their first letter|computes the average of a list
finds common elements of two lists|rotates a list|counts characters with a dictionary
checks whether two strings are anagrams|converts a number to binary|sums the digits of a number
downloads a web page|prints a multiplication table|simulates rolling two dice|shuffles a list
""".strip()

LANGUAGES = "Python|JavaScript|Java|C|C++|Go|Rust|Ruby"

TONGUES = "French|Spanish|German|Italian|Portuguese"

SENTENCES = """
The weather is nice today.|Where is the train station?|I would like a cup of coffee, please.
My sister lives in a small town near the sea.|The meeting starts at ten o'clock.
We had dinner with friends last night.|He is reading a book about history.
Can you help me find my keys?|The children are playing in the garden.|She works at a hospital.
The museum is closed on Mondays.|I forgot to send the report yesterday.|Our flight was delayed.
They bought a new house last year.|You should drink more water.|The dog sleeps under the table.
I am learning to play the guitar.|This restaurant is too expensive.|The bus was late again.
It has been raining since the morning.|Please close the window, it is cold.|What time is it?
""".strip()

NEWS = """
The city council approved a new park near the river, and work will begin in the spring.
Scientists found that the lake has warmed by two degrees, which threatens several kinds of fish.
The company opened a second factory and hired two hundred workers from the region.
After a long delay, the new bridge was opened, and the journey now takes ten minutes less.
The school started a garden project in which every class grows its own vegetables.
A survey shows that more people work from home, but many miss talking to their colleagues.
The museum received a painting that had been lost for eighty years and will show it in May.
Heavy rain flooded several streets, and firefighters pumped water out of forty cellars.
The team lost its first three games but won the next five and reached the final.
Farmers expect a smaller harvest this year because of a cold spring and a dry summer.
The hospital introduced a new system for appointments, and waiting times fell by a third.
Two students built a cheap sensor that measures air quality and warns people by phone.
""".strip()

MESSAGES = """
inviting a colleague to lunch|asking for a day off|apologizing for a late delivery
declining an invitation|asking for a refund|thanking a teacher|introducing a new team member
requesting a meeting|reporting a broken elevator|cancelling a subscription
asking for a letter of recommendation|congratulating a friend on a new job
following up after a job interview|announcing a change of address|asking a customer for feedback
reminding the team of a deadline|offering help to a new neighbour
complaining about a noisy neighbour|confirming a hotel booking|asking about the price of a service
""".strip()

PRODUCTS = """
wireless headphones|a water bottle|a backpack|running shoes|a coffee maker|a mechanical keyboard
a desk chair|a notebook|a bicycle helmet|a garden hose|a cookbook|a smart watch|a rain jacket
a tent|a board game|a scented candle|a wooden toy|a pair of sunglasses|a kitchen knife
a travel pillow
""".strip()

PROBLEMS = """
my phone battery drains quickly|my internet connection is slow|my car makes a strange noise
I cannot fall asleep at night|my plants have yellow leaves|my shower drain is clogged
I keep forgetting names|my back hurts from sitting|my cat scratches the sofa
my bread does not rise|I am nervous before exams|my computer is slow|my shoes smell
my bicycle chain falls off|my neighbour plays loud music|I spend too much money
my printer does not print|my windows are foggy|I have trouble concentrating|my baby cries at night
my dog barks at strangers|my hands are always cold
""".strip()

ACTIVITIES = """
learn a new language|start a garden|train for a marathon|save for a holiday|write a book
move to another city|change careers|build a website|start a podcast|adopt a pet|paint a room
organize a birthday party|prepare for an exam|make new friends|read more books|eat less sugar
learn to swim|plan a wedding|start a small business|buy a used car|reduce plastic waste|meditate
learn to draw|improve handwriting|keep a diary|clean the kitchen|pack a suitcase|fix a flat tyre
change a light bulb|brew good coffee|iron a shirt|sharpen a knife|choose a laptop|back up files
""".strip()

QUALITIES = "brave|lonely|curious|clumsy|grumpy|kind|clever|tiny|old|forgetful|proud|shy"

NAMES = "Anna|Tom|Maria|Ahmed|Lucy|Ben|Sofia|Raj|Emma|Jack|Mei|Carlos|Nina|Peter|Zoe|Omar"

NUMBERS = "4|5|6|7|8|9|12|15|18|20|24|30|36|45|60|75|90|120"

FIELDS: dict[str, str] = {
    "science": SCIENCE,
    "technology": TECHNOLOGY,
    "history": HISTORY,
    "society": SOCIETY,
    "arts": ARTS,
    "topic": "\n".join((SCIENCE, TECHNOLOGY, HISTORY, SOCIETY, ARTS)),
    "other": "\n".join((SCIENCE, TECHNOLOGY, SOCIETY, ARTS)),
    "animal": ANIMALS,
    "place": PLACES,
    "country": COUNTRIES,
    "food": FOODS,
    "job": JOBS,
    "person": PEOPLE,
    "task": CODE_TASKS,
    "language": LANGUAGES,
    "tongue": TONGUES,
    "sentence": SENTENCES,
    "news": NEWS,
    "message": MESSAGES,
    "product": PRODUCTS,
    "problem": PROBLEMS,
    "activity": ACTIVITIES,
    "quality": QUALITIES,
    "name": NAMES,
    "number": NUMBERS,
    "count": "three|five|seven|ten",
}

CHAT_TEMPLATES = """
Explain {topic} in simple terms.
Explain {topic} to a child.
What is {topic}?
What is the history of {topic}?
Why is {topic} important?
How does {technology} work?
How does {science} affect everyday life?
What are the main ideas behind {topic}?
What are the advantages and disadvantages of {technology}?
What are common misconceptions about {topic}?
Give me {count} facts about {topic}.
List {count} examples of {topic}.
Write a short paragraph about {topic}.
Write an introduction for an essay about {topic}.
Write a blog post about {topic}.
Write a quiz with {count} questions about {topic}.
Write a poem about {topic}.
Write a haiku about {topic}.
Write a short speech about {society}.
Compare {topic} and {other}.
What is the difference between {science} and {technology}?
What do {topic} and {other} have in common?
Is {society} good or bad for people? Give arguments for both sides.
What were the causes of {history}?
What were the consequences of {history}?
Describe {history} in a few sentences.
How did {history} change the world?
How can I learn more about {topic}?
Give me {count} tips about {society}.
Give me {count} tips for someone who starts with {arts}.
Create a lesson plan about {topic}.
Define {topic} and give an example.
Summarize what is known about {topic}.
Write a dialogue between a {job} and a {quality} student about {topic}.
Who was {person}?
What is {person} famous for?
Write a short biography of {person}.
Imagine a conversation between {person} and a {job}.
What does a {job} do?
What skills does a {job} need?
Describe a day in the life of a {job}.
Write a job advertisement for a {job}.
Write {count} interview questions for a {job}.
Tell me a story about a {quality} {animal}.
Tell me a story about a {quality} {job} and a {animal}.
Write a short story about a {job} who lives in {place}.
Write a story that begins in {place}.
Write a fable about a {animal} and a {animal}.
Write the opening of a mystery novel set in {place}.
Write a bedtime story about a {animal} who wants to be a {job}.
Describe a {animal}.
What do {animal}s eat?
Where does the {animal} live?
Give me {count} facts about the {animal}.
Write a riddle about a {animal}.
What is the capital of {country}?
What is {country} known for?
What should I see in {country}?
Write a travel guide for {country}.
Plan a weekend in {place}.
Plan a three-day trip to {country}.
Describe {place} in the evening.
How do I make {food}?
Give me a recipe for {food}.
What ingredients do I need for {food}?
Write a shopping list for {food}.
Write a {language} function that {task}.
Write a {language} program that {task}.
Write Python code that {task} and explain it.
How would you test a function that {task}?
What is {technology} in programming and computing?
Write a SQL query that lists the {number} most expensive products.
Write an HTML page about {arts}.
Write a JSON object that describes a {animal}.
Write a JSON object that describes {product}.
Translate into {tongue}: {sentence}
Correct the grammar if needed: {sentence}
Rewrite this sentence in a formal tone: {sentence}
Rewrite this sentence in the past tense: {sentence}
Is this sentence positive or negative? {sentence}
Summarize in one sentence: {news}
Write a headline for this text: {news}
What questions does this text leave open? {news}
Write a short email {message}.
Write a polite message {message}.
Write a product description for {product}.
Write a review of {product}.
Write a slogan for {product}.
Suggest {count} names for a shop that sells {product}.
What should I do if {problem}?
I have a problem: {problem}. Can you help?
How do I {activity}?
Give me {count} tips to {activity}.
Make a checklist for people who want to {activity}.
What are the benefits of deciding to {activity}?
Make a plan to {activity} in one month.
{name} has {number} apples and gives {number} to {name}. How many are left?
A train travels {number} kilometres in {number} minutes. What is its speed?
If one ticket costs {number} dollars, how much do {number} tickets cost?
{name} is {number} years old. How old will {name} be in {number} years?
What is {number} plus {number}?
What is {number} times {number}? Show your steps.
What is {number} percent of {number}?
Sort these numbers: {number}, {number}, {number}, {number}.
A rectangle is {number} cm long and {number} cm wide. What is its area?
""".strip().splitlines()

RAW_TEMPLATES = """
Once upon a time, a {quality} {animal}
Once upon a time in {place},
The capital of {country} is
{topic} is
The history of {topic} begins
In this article, we will look at {topic}.
One of the most important things about {topic} is
{person} was born
The {animal} is
A {job} is a person who
To make {food}, first
# A program that {task}
The main difference between {science} and {technology} is
{name} walked into {place} and
Dear {name},
Question: What is {topic}?\\nAnswer:
The quick brown {animal}
Here are {count} reasons why {society} matters:
""".strip().splitlines()


@dataclass(frozen=True)
class Prompt:
    """A user message for the chat template, or a text to go on with as it is."""

    text: str
    chat: bool


def values(field: str) -> list[str]:
    return [value.strip() for value in re.split(r"[|\n]", FIELDS[field])]


def fill(template: str, rng: random.Random) -> str:
    text = re.sub(r"\{(\w+)\}", lambda match: rng.choice(values(match[1])), template)
    return text.replace("\\n", "\n")


def key(text: str) -> str:
    """Case and punctuation do not make a prompt a different one."""
    return " ".join(re.findall(r"\w+", text.lower()))


def read_prompts(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def template_prompts(seen: set[str], seed: int, raw_share: float = 0.1) -> Iterator[Prompt]:
    """Yield prompts whose keys are not in `seen` yet, without end, and add them.

    Templates are drawn evenly, so that a template with few fillings is not drowned by the others;
    once it has nothing new to give it falls silent.
    """
    rng = random.Random(seed)
    while True:
        chat = rng.random() >= raw_share
        text = fill(rng.choice(CHAT_TEMPLATES if chat else RAW_TEMPLATES), rng)
        if (identity := key(text)) not in seen:
            seen.add(identity)
            yield Prompt(text, chat)

"""The eight tasks of the small checkpoint: each draws a request and the one answer to it.

A task is a pure function of a `random.Random`. Its answers follow from the request by copying,
selecting or a digit-wise rule, so that a program can check them and a very small model can learn them.
Words come from short lists, which keeps nearly every one of them a single token.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from random import Random

NAMES = (
    "Adam Alice Anna Ben Carl Clara Dana David Elena Emma Eric Eva Felix Frank Grace Hanna Ida "
    "Jack James Julia Laura Leo Lily Lucas Maria Mark Martin Mia Mona Nina Noah Nora Paul Peter "
    "Rosa Sam Sara Simon Sofia Tom Vera Victor"
).split()
CITIES = (
    "Athens Berlin Bern Bonn Boston Cairo Chicago Delhi Denver Dublin Hamburg "
    "Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Manila Miami Milan Munich Nice Oslo Paris "
    "Porto Prague Riga Rome Seattle Seoul Sofia Sydney Tokyo Toronto Turin Venice Vienna Warsaw"
).split()
JOBS = (
    "baker barber builder clerk cook dancer dentist doctor driver "
    "farmer guide hunter judge lawyer mason miner nurse painter pilot poet porter printer "
    "singer smith soldier tailor teacher tutor vet waiter writer"
).split()
ITEMS = (
    "apples bags balls bikes books boots bowls boxes cakes candles cards chairs coats coins "
    "cups doors eggs forks hats keys lamps lemons maps nails onions pens plates plums ropes shirts shoes "
    "spoons stamps stones tables tents toys"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
ROOMS = "kitchen bedroom bathroom office garden hall cellar".split()
COLORS = "red green blue white yellow orange pink".split()
GENRES = "rock pop folk soul blues metal".split()
EVENTS = (
    "lunch dinner yoga school work training meeting party concert dance tennis chess cooking reading cleaning"
).split()
VEHICLES = "car bus train bike".split()
CURRENCIES = "EUR USD GBP JPY CHF INR".split()


@dataclass(frozen=True)
class Exchange:
    """One request and its answer; `answer` is the whole assistant text with any thinking part."""

    task: str
    messages: tuple[dict, ...]
    tools: tuple[dict, ...] | None
    answer: str


def _exchange(task: str, prompt: str, answer: str, tools: tuple[dict, ...] | None = None) -> Exchange:
    return Exchange(task, ({"role": "user", "content": prompt},), tools, answer)


def _thinking(steps: list[str], result: str) -> str:
    return "<think>\n" + "\n".join(steps) + "\n</think>\n\n" + result


def final_part(text: str) -> str:
    """The text after its thinking part, without surrounding white space."""
    return text.rpartition("</think>")[2].strip()


def is_correct(exchange: Exchange, text: str) -> bool:
    """Whether `text` gives exactly the reference's result; the thinking part is free."""
    return final_part(text) == final_part(exchange.answer)


# --- sort ---------------------------------------------------------------------------------------------------

_SORT_NUMBERS = (
    "Sort these numbers {order}: {items}.",
    "Put {items} in order, {order}.",
    "{items}: list these numbers {order}.",
)
_SORT_NAMES = (
    "Sort these names in alphabetical order: {items}.",
    "Put {items} in alphabetical order.",
    "{items}: list these names from A to Z.",
)
_ORDERS = (
    ("from smallest to largest", False),
    ("ascending", False),
    ("from largest to smallest", True),
    ("descending", True),
)


def sort(rng: Random) -> Exchange:
    """Order three or four different numbers of two digits, or as many names."""
    count = rng.randint(3, 4)
    if rng.random() < 0.25:
        words = rng.sample(NAMES, count)
        prompt = rng.choice(_SORT_NAMES).format(items=", ".join(words))
        return _exchange("sort", prompt, ", ".join(sorted(words)))
    numbers = rng.sample(range(10, 100), count)
    order, descending = rng.choice(_ORDERS)
    prompt = rng.choice(_SORT_NUMBERS).format(order=order, items=", ".join(map(str, numbers)))
    return _exchange("sort", prompt, ", ".join(map(str, sorted(numbers, reverse=descending))))


# --- date ---------------------------------------------------------------------------------------------------

# Between 1901 and 2099 every fourth year is a leap year, without exception.
_FIRST_DAY, _LAST_DAY = date(1902, 1, 1), date(2098, 12, 31)
_DATE_FORMS: dict[str, Callable[[date], str]] = {
    "ISO": date.isoformat,
    "British": lambda day: f"{day.day} {MONTHS[day.month - 1]} {day.year}",
    "American": lambda day: f"{MONTHS[day.month - 1]} {day.day}, {day.year}",
    "slash": lambda day: f"{day:%d/%m}/{day.year}",
}
_REFORMAT = (
    "Write {dates} in {form} style.",
    "Give me the {form} form of {dates}.",
    "Rewrite as {form} date: {dates}",
)
_NEIGHBOUR = (
    "Which date is the day {side} {day}?",
    "What is the day {side} {day}?",
    "Name the day {side} {day}.",
)


def _any_day(rng: Random) -> date:
    return _FIRST_DAY + timedelta(rng.randint(0, (_LAST_DAY - _FIRST_DAY).days))


def _reformat_dates(rng: Random) -> Exchange:
    source, target = rng.sample(list(_DATE_FORMS), 2)
    days = [_any_day(rng) for _ in range(rng.randint(1, 2))]
    dates = " and ".join(_DATE_FORMS[source](day) for day in days)
    prompt = rng.choice(_REFORMAT).format(dates=dates, form=target)
    return _exchange("date", prompt, " and ".join(_DATE_FORMS[target](day) for day in days))


def _neighbouring_day(rng: Random) -> Exchange:
    day = _any_day(rng)
    if rng.random() < 0.2:
        # Month ends are rare among all days, and they are the part of the rule worth practising.
        day = day.replace(day=1) - timedelta(rng.randint(0, 1))
    side, step = rng.choice((("after", 1), ("before", -1)))
    write = rng.choice(list(_DATE_FORMS.values()))
    prompt = rng.choice(_NEIGHBOUR).format(side=side, day=write(day))
    return _exchange("date", prompt, f"The day {side} {write(day)} is {write(day + timedelta(step))}.")


def reformat_date(rng: Random) -> Exchange:
    """Write one or two dates in another form, or name the day after or before one."""
    return _reformat_dates(rng) if rng.random() < 0.6 else _neighbouring_day(rng)


# --- units --------------------------------------------------------------------------------------------------

# (large unit, small unit, decimal places between them)
_UNITS = (
    ("km", "m", 3),
    ("m", "cm", 2),
    ("cm", "mm", 1),
    ("m", "mm", 3),
    ("t", "kg", 3),
    ("kg", "g", 3),
    ("g", "mg", 3),
    ("l", "ml", 3),
    ("l", "cl", 2),
    ("kW", "W", 3),
)
_CLOCK = (("h", "min"), ("min", "s"))
_CONVERT = (
    "Convert {}.",
    "Please convert {}.",
    "Do these conversions: {}",
)


def _plain(value: Decimal) -> str:
    return format(value.normalize(), "f")


def _quantity(rng: Random) -> tuple[str, str, str, str]:
    """A value, its unit, the same quantity's value in another unit, and that unit."""
    if rng.random() < 0.15:
        large, small = rng.choice(_CLOCK)
        count = rng.randint(2, 20)
        pair = (str(count), large, str(count * 60), small)
    else:
        large, small, places = rng.choice(_UNITS)
        # At most three digits differ from zero, and the value in the small unit is whole.
        whole = Decimal(rng.randint(1, 999)) * 10 ** rng.randint(0, places)
        pair = (_plain(whole.scaleb(-places)), large, _plain(whole), small)
    return pair if rng.random() < 0.5 else pair[2:] + pair[:2]


def convert_units(rng: Random) -> Exchange:
    """Convert one or two quantities between metric units or units of time."""
    quantities = [_quantity(rng) for _ in range(rng.randint(1, 2))]
    request = " and ".join(f"{value} {unit} to {other}" for value, unit, _, other in quantities)
    answer = ", ".join(f"{value} {unit} = {result} {other}" for value, unit, result, other in quantities)
    return _exchange("units", rng.choice(_CONVERT).format(request), answer)


# --- json ---------------------------------------------------------------------------------------------------

_PEOPLE = (
    "{name} is {age} years old, lives in {city} and works as a {job}.",
    "{name} from {city} is a {job}, age {age}.",
    "The {job} {name} is {age} and lives in {city}.",
)
_AS_JSON = (
    "Write as JSON with the keys {keys}: {facts}",
    "{facts} Give me a JSON object with {keys}.",
    "Extract {keys} as JSON. {facts}",
)


def write_json(rng: Random) -> Exchange:
    """Pick the asked facts about a person out of a sentence, as one compact JSON object."""
    facts = {
        "name": rng.choice(NAMES),
        "age": rng.randint(18, 99),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
    }
    keys = rng.sample(list(facts), rng.randint(3, 4))
    sentence = rng.choice(_PEOPLE).format(**facts)
    prompt = rng.choice(_AS_JSON).format(keys=", ".join(keys), facts=sentence)
    return _exchange("json", prompt, json.dumps({key: facts[key] for key in keys}, separators=(",", ":")))


# --- table --------------------------------------------------------------------------------------------------

# (words of the first column, header, one record in words); only the first column holds words.
_RECORDS = (
    (NAMES, "name,age,points", "{} is {} and has {} points"),
    (ITEMS, "item,price,stock", "{} cost {} euros, {} in stock"),
    (CITIES, "city,wind,rain", "{} has wind {} and rain {}"),
)
_AS_TABLE = (
    "Write as CSV with header {header}: {records}.",
    "Make a CSV table ({header}): {records}.",
    "{records}. Turn this into CSV with header {header}.",
)


def write_table(rng: Random) -> Exchange:
    """Write two or three records as CSV lines below a header."""
    words, header, record = rng.choice(_RECORDS)
    rows = [(word, rng.randint(1, 99), rng.randint(1, 99)) for word in rng.sample(words, rng.randint(2, 3))]
    records = "; ".join(record.format(*row) for row in rows)
    prompt = rng.choice(_AS_TABLE).format(header=header, records=records)
    return _exchange("table", prompt, "\n".join([header, *(",".join(map(str, row)) for row in rows)]))


# --- tool ---------------------------------------------------------------------------------------------------


def _clock_time(rng: Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"


def _message_text(rng: Random) -> str:
    return f"{rng.choice(EVENTS)} at {_clock_time(rng)}"


def _phone(rng: Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(6))


def _one_of(words: list[str]) -> Callable[[Random], str]:
    return lambda rng: rng.choice(words)


def _up_to(last: int) -> Callable[[Random], int]:
    return lambda rng: rng.randint(1, last)


# Each tool: its parameters with the way to draw a value, then the requests that need it.
_TOOLS: dict[str, tuple[dict[str, Callable[[Random], str | int]], tuple[str, ...]]] = {
    "get_weather": (
        {"city": _one_of(CITIES), "day": _one_of(DAYS), "time": _clock_time},
        ("What is the weather in {city} on {day} at {time}?", "Weather for {city}, {day} {time}, please."),
    ),
    "set_alarm": (
        {"time": _clock_time, "label": _one_of(EVENTS)},
        ("Wake me at {time} for {label}.", "Set an alarm for {label} at {time}."),
    ),
    "set_timer": (
        {"minutes": _up_to(99), "seconds": _up_to(59), "label": _one_of(EVENTS)},
        (
            "Start a {label} timer of {minutes} min {seconds} s.",
            "Timer for {label}: {minutes} min {seconds} s.",
        ),
    ),
    "send_message": (
        {"name": _one_of(NAMES), "text": _message_text},
        ("Send {name} this message: {text}", "Text {name}: {text}"),
    ),
    "play_music": (
        {"genre": _one_of(GENRES), "room": _one_of(ROOMS), "volume": _up_to(99)},
        (
            "Play {genre} in the {room} at volume {volume}.",
            "I want {genre} music in the {room}, volume {volume}.",
        ),
    ),
    "set_light": (
        {"room": _one_of(ROOMS), "color": _one_of(COLORS), "level": _up_to(99)},
        (
            "Make the {room} light {color} at level {level}.",
            "Set the light in the {room} to {color}, {level}.",
        ),
    ),
    "book_table": (
        {"city": _one_of(CITIES), "people": _up_to(12), "time": _clock_time},
        (
            "Book a table in {city} for {people} at {time}.",
            "We are {people}, get us a table in {city} at {time}.",
        ),
    ),
    "find_flight": (
        {"start": _one_of(CITIES), "end": _one_of(CITIES), "day": _one_of(DAYS), "price": _up_to(999)},
        (
            "Find a flight from {start} to {end} on {day} below {price}.",
            "Fly {start} to {end}, {day}, max {price}.",
        ),
    ),
    "convert_money": (
        {"amount": _up_to(9999), "source": _one_of(CURRENCIES), "target": _one_of(CURRENCIES)},
        ("How much is {amount} {source} in {target}?", "Change {amount} {source} to {target}."),
    ),
    "add_event": (
        {"title": _one_of(EVENTS), "day": _one_of(DAYS), "time": _clock_time},
        ("Add {title} on {day} at {time} to my calendar.", "Calendar: {title}, {day}, {time}."),
    ),
    "order_items": (
        {"item": _one_of(ITEMS), "count": _up_to(99), "city": _one_of(CITIES)},
        ("Order {count} {item} to {city}.", "Please send {count} {item} to {city}."),
    ),
    "set_price": (
        {"item": _one_of(ITEMS), "price": _up_to(9999)},
        ("Set the price of {item} to {price}.", "From now on {item} cost {price}."),
    ),
    "add_contact": (
        {"name": _one_of(NAMES), "phone": _phone},
        ("Save the number of {name}: {phone}", "Add {name} to my contacts, phone {phone}."),
    ),
    "log_run": (
        {"day": _one_of(DAYS), "meters": _up_to(9999), "minutes": _up_to(99)},
        ("On {day} I ran {meters} m in {minutes} min.", "Log my run: {day}, {meters} m, {minutes} min."),
    ),
    "get_route": (
        {"start": _one_of(CITIES), "end": _one_of(CITIES), "vehicle": _one_of(VEHICLES), "time": _clock_time},
        (
            "How do I get from {start} to {end} by {vehicle} at {time}?",
            "Route {start} to {end}, {vehicle}, {time}.",
        ),
    ),
    "hire": (
        {"name": _one_of(NAMES), "job": _one_of(JOBS), "city": _one_of(CITIES)},
        ("Hire {name} as a {job} in {city}.", "{name} is our new {job} in {city}, do the hiring."),
    ),
}


def _schema(name: str) -> dict:
    example = {key: draw(Random(0)) for key, draw in _TOOLS[name][0].items()}
    properties = {key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in example.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOL_SCHEMAS: dict[str, dict] = {name: _schema(name) for name in _TOOLS}


def call_tool(rng: Random) -> Exchange:
    """Choose the one fitting tool of two or three and fill in its arguments from the request."""
    offered = rng.sample(list(_TOOLS), rng.randint(2, 3))
    name = rng.choice(offered)
    parameters, requests = _TOOLS[name]
    arguments = {key: draw(rng) for key, draw in parameters.items()}
    while len(set(arguments.values())) < len(arguments):
        # A route from a city to itself would be an odd request.
        arguments = {key: draw(rng) for key, draw in parameters.items()}
    call = json.dumps({"name": name, "arguments": arguments})
    answer = f"<tool_call>\n{call}\n</tool_call>"
    prompt = rng.choice(requests).format(**arguments)
    return _exchange("tool", prompt, answer, tuple(TOOL_SCHEMAS[tool] for tool in offered))


# --- add ----------------------------------------------------------------------------------------------------

_SUM = ("What is {}?", "Calculate {}.", "{} = ?", "Please work out {}.")


def _columns(first: int, second: int) -> list[tuple[int, int]]:
    """The digit pairs of two numbers of three digits, the last digits first."""
    return [(int(a), int(b)) for a, b in zip(f"{first:03}"[::-1], f"{second:03}"[::-1], strict=True)]


def addition_steps(first: int, second: int) -> list[str]:
    """One line `a+b+carry=ts` a column; `t` is the carry into the next line, `s` the result's digit.

    All lines have one length, so each character stands at the same distance from the ones it follows from.
    """
    steps, carry = [], 0
    for a, b in _columns(first, second):
        total = a + b + carry
        steps.append(f"{a}+{b}+{carry}={total:02}")
        carry = total // 10
    return steps


def subtraction_steps(first: int, second: int) -> list[str]:
    """One line `ta-b-borrow=s` a column; `t` is 1 if this column borrows ten from the next one."""
    steps, borrow = [], 0
    for a, b in _columns(first, second):
        borrowed = int(a < b + borrow)
        steps.append(f"{borrowed}{a}-{b}-{borrow}={10 * borrowed + a - b - borrow}")
        borrow = borrowed
    return steps


def add(rng: Random) -> Exchange:
    """Add or subtract two numbers of three digits, column by column.

    One length for all numbers: a small model finds the hundreds by their place behind a space, and would have to
    count digits from the far end to find them otherwise.
    """
    first, second = rng.randint(100, 999), rng.randint(100, 999)
    if rng.random() < 0.6:
        text, result, steps = f"{first} + {second}", first + second, addition_steps(first, second)
    else:
        first, second = max(first, second), min(first, second)
        text, result, steps = f"{first} - {second}", first - second, subtraction_steps(first, second)
    return _exchange("add", rng.choice(_SUM).format(text), _thinking(steps, str(result)))


# --- word ---------------------------------------------------------------------------------------------------

# The calculations stay inside the tables a child learns by heart: sums to 18 and their reverse, products of digits.


def _give_away(rng: Random) -> tuple[str, list[str], str]:
    (one, other), item = rng.sample(NAMES, 2), rng.choice(ITEMS)
    had, more = rng.randint(2, 9), rng.randint(2, 9)
    total = had + more
    given = rng.randint(2, min(9, total - 1))
    ask = rng.choice(("How many {} are left?", "How many {} does {} have now?")).format(item, one)
    text = f"{one} has {had} {item}, buys {more} more and gives {given} to {other}. {ask}"
    return text, [f"{had}+{more}={total}", f"{total}-{given}={total - given}"], f"{total - given} {item}"


def _lose_and_find(rng: Random) -> tuple[str, list[str], str]:
    one, item = rng.choice(NAMES), rng.choice(ITEMS)
    had, found = rng.randint(3, 9), rng.randint(2, 9)
    lost = rng.randint(2, had - 1)
    ask = rng.choice(("How many {} are left?", "How many {} does {} have now?")).format(item, one)
    text = f"{one} has {had} {item}, loses {lost} of them and finds {found} others. {ask}"
    left = had - lost
    return text, [f"{had}-{lost}={left}", f"{left}+{found}={left + found}"], f"{left + found} {item}"


def _packed(rng: Random) -> tuple[str, list[str], str]:
    (one, other), item = rng.sample(NAMES, 2), rng.choice(ITEMS)
    packs, each = rng.randint(2, 9), rng.randint(2, 9)
    ask = rng.choice(("How many {} are there?", "How many {} does {} get?")).format(item, other)
    text = f"{one} sends {other} {packs} packs with {each} {item} each. {ask}"
    return text, [f"{packs}*{each}={packs * each}"], f"{packs * each} {item}"


def _together(rng: Random) -> tuple[str, list[str], str]:
    (one, other), item = rng.sample(NAMES, 2), rng.choice(ITEMS)
    had, more = rng.randint(2, 9), rng.randint(2, 9)
    ask = rng.choice(("How many {} do they have together?", "How many {} are there in all?")).format(item)
    text = f"{one} has {had} {item}. {other} has {more} more than {one}. {ask}"
    others = had + more
    return text, [f"{had}+{more}={others}", f"{others}+{had}={had + others}"], f"{had + others} {item}"


def solve_word_problem(rng: Random) -> Exchange:
    """Solve a problem of one or two small calculations, one a line."""
    text, steps, result = rng.choice((_give_away, _lose_and_find, _packed, _together))(rng)
    return _exchange("word", text, _thinking(steps, result))


TASKS: dict[str, Callable[[Random], Exchange]] = {
    "sort": sort,
    "date": reformat_date,
    "units": convert_units,
    "json": write_json,
    "table": write_table,
    "tool": call_tool,
    "add": add,
    "word": solve_word_problem,
}

//! Parses lines into steps. Never panics, whatever the text.

use std::sync::Arc;
use std::time::Duration;

use super::calls::{ArgumentKind, Signature, signature};
use super::cursor::{Cursor, Parsed};
use super::packet::{Direction, packet};
use super::{
    Action, Argument, Base, Call, Comparison, Expression, Family, Field, Outcome, ParseError,
    Place, Script, Step, Time,
};

/// The meaning of a line.
pub(super) enum Line {
    Empty,
    Families(Vec<Family>),
    Sysctl(String, String),
    Include(String),
    Step(Box<Step>),
}

/// Parses a script that includes no other file.
pub fn parse(text: &str) -> Result<Script, ParseError> {
    let file: Arc<str> = "script".into();
    let mut script = Script {
        about: about(text),
        families: Vec::new(),
        sysctls: Vec::new(),
        steps: Vec::new(),
    };
    for (index, text) in text.lines().enumerate() {
        match line(&file, index + 1, text)? {
            Line::Empty => {}
            Line::Families(families) => script.families = families,
            Line::Sysctl(name, value) => script.sysctls.push((name, value)),
            Line::Step(step) => script.steps.push(*step),
            Line::Include(_) => {
                return Err(ParseError {
                    line: index + 1,
                    column: 1,
                    message: "only a file can include another".to_owned(),
                });
            }
        }
    }
    if script.families.is_empty() {
        script.families.push(Family::V4);
    }
    Ok(script)
}

/// Returns the comment at the head of a text.
pub(super) fn about(text: &str) -> String {
    let lines = text.lines().map_while(|line| line.strip_prefix('#'));
    lines.map(str::trim).collect::<Vec<_>>().join("\n")
}

pub(super) fn line(file: &Arc<str>, number: usize, text: &str) -> Parsed<Line> {
    let cursor = &mut Cursor::new(text, number);
    if cursor.is_at_end() {
        return Ok(Line::Empty);
    }
    if let Some(directive) = directive(cursor)? {
        return Ok(directive);
    }
    let time = time(cursor)?;
    let action = action(cursor)?;
    cursor.expect_end()?;
    let place = Place {
        file: file.clone(),
        line: number,
        text: text.trim().into(),
    };
    Ok(Line::Step(Box::new(Step {
        place,
        time,
        action,
    })))
}

fn directive(cursor: &mut Cursor) -> Parsed<Option<Line>> {
    let line = if cursor.take_word("include") {
        Line::Include(cursor.chunk().to_owned())
    } else if cursor.take_word("families") {
        let mut families = Vec::new();
        while let Some(number) = cursor.number() {
            families.push(match number {
                4 => Family::V4,
                6 => Family::V6,
                _ => return cursor.error("families are 4 and 6"),
            });
        }
        Line::Families(families)
    } else if cursor.take_word("sysctl") {
        let name = cursor.chunk().to_owned();
        cursor.expect("=")?;
        let value = cursor.rest().trim().to_owned();
        if name.contains("..") || !name.starts_with("net.") || value.is_empty() {
            return cursor.error("sysctl net.NAME = VALUE");
        }
        return Ok(Some(Line::Sysctl(name, value)));
    } else {
        return Ok(None);
    };
    cursor.expect_end()?;
    Ok(Some(line))
}

/// Parses `+0.2`, that time or later, or `+[0.2,0.5]`, between the two.
fn time(cursor: &mut Cursor) -> Parsed<Time> {
    if !cursor.take("+") {
        return Ok(Time::default());
    }
    if !cursor.take("[") {
        return Ok(Time {
            earliest: cursor.seconds()?,
            latest: None,
        });
    }
    let earliest = cursor.seconds()?;
    cursor.expect(",")?;
    let latest = cursor.seconds()?;
    cursor.expect("]")?;
    if latest < earliest {
        return cursor.error("the latest moment is before the earliest");
    }
    Ok(Time {
        earliest,
        latest: Some(latest),
    })
}

fn action(cursor: &mut Cursor) -> Parsed<Action> {
    if cursor.take("<") {
        return Ok(Action::Inject(packet(cursor, Direction::In)?));
    }
    if cursor.take(">") {
        return Ok(Action::Expect(packet(cursor, Direction::Out)?));
    }
    let word = cursor.expect_word("a step")?;
    match word {
        "maybe" => {
            cursor.expect(">")?;
            Ok(Action::Allow(packet(cursor, Direction::Out)?))
        }
        "quiet" => Ok(Action::Quiet(quiet(cursor)?)),
        "start" => {
            let name = cursor.expect_word("a name")?.to_owned();
            let called = cursor.expect_word("a call")?;
            let call = call(cursor, called)?;
            Ok(Action::Start { name, call })
        }
        "await" => {
            let name = cursor.expect_word("a name")?.to_owned();
            let result = outcome(cursor)?;
            Ok(Action::Await { name, result })
        }
        "pending" => Ok(Action::Pending(cursor.expect_word("a name")?.to_owned())),
        word if cursor.take("=") => {
            let called = cursor.expect_word("a call")?;
            let call = call(cursor, called)?;
            let result = Outcome::Named(word.to_owned());
            Ok(Action::Call { call, result })
        }
        word => {
            let call = call(cursor, word)?;
            let result = outcome(cursor)?;
            Ok(Action::Call { call, result })
        }
    }
}

fn quiet(cursor: &mut Cursor) -> Parsed<Duration> {
    cursor.seconds()
}

fn call(cursor: &mut Cursor, name: &str) -> Parsed<Call> {
    let Some(signature) = signature(name) else {
        return cursor.error(format!("there is no call {name:?}"));
    };
    cursor.expect("(")?;
    let mut arguments = Vec::new();
    while !cursor.take(")") {
        if !arguments.is_empty() {
            cursor.expect(",")?;
        }
        let mut all = signature.needed.iter().chain(signature.optional);
        match all.nth(arguments.len()) {
            Some(kind) => arguments.push(argument(cursor, *kind)?),
            None => return cursor.error(too_many(signature)),
        }
    }
    if arguments.len() < signature.needed.len() {
        return cursor.error(format!("{name} takes more than that"));
    }
    Ok(Call {
        name: signature.name,
        arguments,
    })
}

fn too_many(signature: &Signature) -> String {
    let most = signature.needed.len() + signature.optional.len();
    format!("{} takes {most} arguments at most", signature.name)
}

fn argument(cursor: &mut Cursor, kind: ArgumentKind) -> Parsed<Argument> {
    use ArgumentKind::{Data, Number, Value, Words};
    if matches!(kind, Data | Value)
        && let Some(text) = cursor.text()?
    {
        return Ok(Argument::Text(text));
    }
    if kind != Words
        && let Some(number) = cursor.expression()?
    {
        return Ok(Argument::Number(number));
    }
    match (kind, words(cursor)?) {
        // A descriptor by its name.
        (Number, words) if words.len() == 1 => Ok(Argument::Number(Expression {
            base: Base::Variable(words.concat()),
            plus: 0,
        })),
        (Words | Value, words) => Ok(Argument::Words(words)),
        _ => cursor.error("a number is missing"),
    }
}

fn words(cursor: &mut Cursor) -> Parsed<Vec<String>> {
    let mut words = vec![cursor.expect_word("an argument")?.to_owned()];
    while cursor.take("|") {
        words.push(cursor.expect_word("a word")?.to_owned());
    }
    Ok(words)
}

fn outcome(cursor: &mut Cursor) -> Parsed<Outcome> {
    if !cursor.take("=") {
        return Ok(Outcome::Success);
    }
    if cursor.take("*") {
        return Ok(Outcome::Any);
    }
    if let Some(text) = cursor.text()? {
        return Ok(Outcome::Text(text));
    }
    if let Some(number) = cursor.expression()? {
        let field = Field::Compare(Comparison::Equal, number);
        return Ok(Outcome::Number(field));
    }
    if cursor.rest().trim_start().starts_with(['<', '>', '!', '?']) {
        return Ok(Outcome::Number(cursor.field("a number")?));
    }
    let words = words(cursor)?;
    let is_errno = |word: &str| {
        word.len() > 1 && word.starts_with('E') && !word.contains(|c: char| c.is_ascii_lowercase())
    };
    match &words[..] {
        [word] if is_errno(word) => Ok(Outcome::Errno(word.clone())),
        _ => Ok(Outcome::Words(words)),
    }
}

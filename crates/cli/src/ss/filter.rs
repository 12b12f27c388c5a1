//! Filters of ss(8): `state established`, `sport = :80`, `dst 10.0.0.0/8`, with `and`, `or`, `not` and parentheses.

use std::net::{IpAddr, SocketAddr};

use super::services::Services;
use super::state::States;

/// The properties of a socket that a filter tests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject {
    pub local: Option<SocketAddr>,
    pub peer: Option<SocketAddr>,
}

#[derive(Debug, PartialEq)]
pub(super) struct Filter {
    /// None: the filter names no state.
    pub states: Option<States>,
    expression: Option<Expression>,
}

#[derive(Debug, PartialEq)]
enum Expression {
    Not(Box<Expression>),
    And(Box<Expression>, Box<Expression>),
    Or(Box<Expression>, Box<Expression>),
    Port(End, Comparison, u16),
    Address(End, Prefix, Option<u16>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Local,
    Peer,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Comparison {
    Equal,
    Unequal,
    Less,
    AtMost,
    Greater,
    AtLeast,
}

/// An address prefix; without an address, all addresses.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Prefix {
    address: Option<IpAddr>,
    length: u8,
}

/// Limit of the depth of nested parentheses.
const DEEPEST: usize = 64;

impl Filter {
    /// Parses the words of a command line, each of which may contain several words of the filter.
    pub(super) fn parse(words: &[String], services: &Services) -> Result<Filter, String> {
        let tokens = tokens(&words.join(" "));
        let mut parser = Parser {
            tokens: &tokens,
            services,
            depth: 0,
        };
        let states = parser.states()?;
        let expression = match parser.tokens {
            [] => None,
            _ => Some(parser.either()?),
        };
        match parser.tokens.first() {
            None => Ok(Filter { states, expression }),
            Some(rest) => Err(format!("filter: {rest:?} is not expected")),
        }
    }

    pub(super) fn admits(&self, subject: &Subject) -> bool {
        let expression = self.expression.as_ref();
        expression.is_none_or(|expression| expression.holds(subject))
    }
}

impl Expression {
    fn holds(&self, subject: &Subject) -> bool {
        let at = |end: &End| match end {
            End::Local => subject.local,
            End::Peer => subject.peer,
        };
        match self {
            Expression::Not(inner) => !inner.holds(subject),
            Expression::And(one, other) => one.holds(subject) && other.holds(subject),
            Expression::Or(one, other) => one.holds(subject) || other.holds(subject),
            Expression::Port(end, comparison, port) => {
                // A socket without a peer has port 0, as in the kernel.
                comparison.holds(at(end).map_or(0, |address| address.port()), *port)
            }
            Expression::Address(end, prefix, port) => at(end).is_some_and(|address| {
                prefix.has(address.ip()) && port.is_none_or(|port| port == address.port())
            }),
        }
    }
}

impl Comparison {
    fn named(word: &str) -> Option<Comparison> {
        Some(match word {
            "=" | "==" | "eq" => Comparison::Equal,
            "!=" | "<>" | "ne" | "neq" => Comparison::Unequal,
            "<" | "lt" => Comparison::Less,
            "<=" | "le" | "leq" => Comparison::AtMost,
            ">" | "gt" => Comparison::Greater,
            ">=" | "ge" | "geq" => Comparison::AtLeast,
            _ => return None,
        })
    }

    fn holds(self, one: u16, other: u16) -> bool {
        match self {
            Comparison::Equal => one == other,
            Comparison::Unequal => one != other,
            Comparison::Less => one < other,
            Comparison::AtMost => one <= other,
            Comparison::Greater => one > other,
            Comparison::AtLeast => one >= other,
        }
    }
}

impl Prefix {
    fn parse(text: &str) -> Result<Prefix, String> {
        let wrong = || format!("filter: {text:?} is not an address");
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address, Some(length.parse().map_err(|_| wrong())?)),
            None => (text, None),
        };
        if matches!(address, "" | "*") {
            return Ok(Prefix {
                address: None,
                length: 0,
            });
        }
        let address = address.trim_start_matches('[').trim_end_matches(']');
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let length = length.unwrap_or(longest);
        if length <= longest {
            Ok(Prefix {
                address: Some(address),
                length,
            })
        } else {
            Err(wrong())
        }
    }

    fn has(self, other: IpAddr) -> bool {
        let same = |difference: u128, width: u32| {
            difference
                .checked_shr(width - u32::from(self.length))
                .unwrap_or(0)
                == 0
        };
        match (self.address, other.to_canonical()) {
            (None, _) => true,
            (Some(IpAddr::V4(one)), IpAddr::V4(other)) => {
                same(u128::from(u32::from(one) ^ u32::from(other)), 32)
            }
            (Some(IpAddr::V6(one)), IpAddr::V6(other)) => {
                same(u128::from(one) ^ u128::from(other), 128)
            }
            _ => false,
        }
    }
}

/// Splits the text into words; operators and parentheses need no spaces around them.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens: Vec<String> = Vec::new();
    let mut word = String::new();
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        let is_mark = "()!=<>&|".contains(character);
        if (is_mark || character.is_whitespace()) && !word.is_empty() {
            tokens.push(std::mem::take(&mut word));
        }
        if is_mark {
            let mut mark = character.to_string();
            let pairs = ["!=", "==", "<=", ">=", "<>", "&&", "||"];
            if let Some(next) = characters.peek()
                && pairs.contains(&format!("{character}{next}").as_str())
            {
                mark.push(*next);
                characters.next();
            }
            tokens.push(mark);
        } else if !character.is_whitespace() {
            word.push(character);
        }
    }
    if !word.is_empty() {
        tokens.push(word);
    }
    tokens
}

struct Parser<'a> {
    tokens: &'a [String],
    services: &'a Services,
    depth: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<&str> {
        self.tokens.first().map(String::as_str)
    }

    fn next(&mut self, wanted: &str) -> Result<String, String> {
        let (first, rest) = self
            .tokens
            .split_first()
            .ok_or_else(|| format!("filter: {wanted} is missing at the end"))?;
        self.tokens = rest;
        Ok(first.clone())
    }

    /// Consumes the next word and returns true if it is one of `words`.
    fn takes(&mut self, words: &[&str]) -> bool {
        let is_there = self.peek().is_some_and(|word| words.contains(&word));
        if is_there {
            self.tokens = &self.tokens[1..];
        }
        is_there
    }

    /// Parses `state X`, which adds states, and `exclude X`, which removes them.
    fn states(&mut self) -> Result<Option<States>, String> {
        let mut states = None;
        loop {
            let excludes = match self.peek() {
                Some("state") => false,
                Some("exclude" | "excl") => true,
                _ => return Ok(states),
            };
            self.tokens = &self.tokens[1..];
            let name = self.next("a state")?;
            let named = States::named(&name)
                .ok_or_else(|| format!("filter: there is no state {name:?}"))?;
            states = Some(if excludes {
                states.unwrap_or(States::ALL).without(named)
            } else {
                states.unwrap_or(States::NONE).with(named)
            });
        }
    }

    fn either(&mut self) -> Result<Expression, String> {
        let mut left = self.both()?;
        while self.takes(&["or", "|", "||"]) {
            left = Expression::Or(Box::new(left), Box::new(self.both()?));
        }
        Ok(left)
    }

    /// Parses a conjunction. `and` may be left out between predicates.
    fn both(&mut self) -> Result<Expression, String> {
        let mut left = self.one()?;
        loop {
            let is_named = self.takes(&["and", "&", "&&"]);
            let ends = matches!(self.peek(), None | Some("or" | "|" | "||" | ")"));
            if ends && !is_named {
                return Ok(left);
            }
            left = Expression::And(Box::new(left), Box::new(self.one()?));
        }
    }

    fn one(&mut self) -> Result<Expression, String> {
        if self.depth == DEEPEST {
            return Err("filter: too many parentheses".to_owned());
        }
        self.depth += 1;
        let found = self.predicate();
        self.depth -= 1;
        found
    }

    fn predicate(&mut self) -> Result<Expression, String> {
        let word = self.next("a condition")?;
        match word.as_str() {
            "not" | "!" => Ok(Expression::Not(Box::new(self.one()?))),
            "(" => {
                let inner = self.either()?;
                if self.takes(&[")"]) {
                    Ok(inner)
                } else {
                    Err("filter: ) is missing".to_owned())
                }
            }
            "sport" => self.port(End::Local),
            "dport" => self.port(End::Peer),
            "src" => self.address(End::Local),
            "dst" => self.address(End::Peer),
            other => Err(format!(
                "filter: {other:?} is not known; there are state, exclude, src, dst, sport, dport, and, or, not"
            )),
        }
    }

    fn port(&mut self, end: End) -> Result<Expression, String> {
        let word = self.next("a comparison")?;
        let (comparison, port) = match Comparison::named(&word) {
            Some(comparison) => (comparison, self.next("a port")?),
            None => (Comparison::Equal, word),
        };
        Ok(Expression::Port(end, comparison, self.number(&port)?))
    }

    /// Parses a port: `80`, `:80`, `:http`.
    fn number(&self, text: &str) -> Result<u16, String> {
        let name = text.trim_start_matches(':');
        let number = name.parse().ok().or_else(|| self.services.port(name));
        number.ok_or_else(|| format!("filter: {text:?} is not a port"))
    }

    /// Parses `10.0.0.0/8`, `10.0.0.1:80`, `[fe80::1]:80` or `:80`, optionally after `=` or `!=`.
    fn address(&mut self, end: End) -> Result<Expression, String> {
        let word = self.next("an address")?;
        let (is_negated, text) = match Comparison::named(&word) {
            Some(Comparison::Equal) => (false, self.next("an address")?),
            Some(Comparison::Unequal) => (true, self.next("an address")?),
            _ => (false, word),
        };
        let text = ["inet:", "inet6:"]
            .iter()
            .find_map(|family| text.strip_prefix(family))
            .unwrap_or(&text);
        let is_bare_v6 = text.matches(':').count() > 1 && !text.starts_with('[');
        let (address, port) = match text.rsplit_once(':') {
            Some((address, port)) if !is_bare_v6 && !port.contains(']') => {
                (address, (port != "*").then(|| self.number(port)))
            }
            _ => (text, None),
        };
        let found = Expression::Address(end, Prefix::parse(address)?, port.transpose()?);
        Ok(if is_negated {
            Expression::Not(Box::new(found))
        } else {
            found
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Filter, String> {
        let words: Vec<_> = text.split(' ').map(str::to_owned).collect();
        Filter::parse(
            &words,
            &Services::of("http 80/tcp www\nssh 22/tcp # shell\n"),
        )
    }

    /// Returns true if a filter admits a connection from 10.1.2.3:80 to 192.0.2.1:40000.
    fn admits(text: &str) -> bool {
        parse(text).expect(text).admits(&Subject {
            local: Some("10.1.2.3:80".parse().unwrap()),
            peer: Some("192.0.2.1:40000".parse().unwrap()),
        })
    }

    #[test]
    fn ports_and_addresses_are_compared_as_people_write_them() {
        for text in [
            "sport = :80",
            "sport = 80",
            "sport :http",
            "sport eq http",
            "sport=:www",
            "dport > 1024",
            "dport >= :40000",
            "dport != :22",
            "src 10.0.0.0/8",
            "src 10.1.2.3",
            "src 10.1.2.3:80",
            "src = 10.0.0.0/8",
            "dst 192.0.2.1:40000",
            "dst != 10.0.0.0/8",
            "src :80",
            "src *:80",
            "dst inet:192.0.2.0/24",
        ] {
            assert!(admits(text), "{text}");
        }
        for text in [
            "sport = :22",
            "dport lt 1024",
            "src 11.0.0.0/8",
            "src 10.1.2.3:81",
            "dst ::1",
            "dst [::1]:80",
            "src fe80::/10",
        ] {
            assert!(!admits(text), "{text}");
        }
    }

    #[test]
    fn conditions_are_joined_and_negated() {
        for text in [
            "sport = :80 and dst 192.0.2.1",
            "sport = :80 dst 192.0.2.1",
            "sport = :22 or sport = :80",
            "not sport = :22",
            "! ( sport = :22 or dport = :22 )",
            "(sport=:80||sport=:22)&&!(dst 10.0.0.0/8)",
            "sport = :22 or sport = :80 and dst 192.0.2.1",
        ] {
            assert!(admits(text), "{text}");
        }
        for text in [
            "sport = :80 and not dst 192.0.2.1",
            "sport = :22 or sport = :80 and dst 10.0.0.1",
        ] {
            assert!(!admits(text), "{text}");
        }
    }

    #[test]
    fn states_are_named_before_conditions() {
        let filter = parse("state established state syn-sent dport = :80").unwrap();
        assert!(filter.states.unwrap().has(States::of_socket("SYN-SENT")));
        assert!(!filter.states.unwrap().has(States::of_socket("LISTEN")));
        let filter = parse("exclude time-wait").unwrap();
        assert!(!filter.states.unwrap().has(States::of_socket("TIME-WAIT")));
        assert!(filter.states.unwrap().has(States::of_socket("LISTEN")));
    }

    #[test]
    fn what_means_nothing_is_named() {
        for (text, part) in [
            ("state nosuch", "nosuch"),
            ("sport", "comparison"),
            ("sport =", "a port"),
            ("sport = :nosuch", "nosuch"),
            ("src 10.0.0.0/33", "10.0.0.0/33"),
            ("( sport = 1", ") is missing"),
            ("sport = 1 )", ")"),
            ("colour red", "colour"),
            ("sport = 1 and", "condition"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(parse(&"( ".repeat(100_000)).is_err());
    }

    #[test]
    fn no_filter_makes_the_parser_panic() {
        portolan_fuzz::check!(2000)
            .with_type::<Vec<(u8, String)>>()
            .for_each(|words| {
                const WORDS: [&str; 14] = [
                    "(",
                    ")",
                    "!",
                    "and",
                    "or",
                    "sport",
                    "dst",
                    "=",
                    ":80",
                    "10.0.0.0/8",
                    "[::1]:7",
                    "state",
                    "all",
                    "/",
                ];
                let words: Vec<String> = words
                    .iter()
                    .map(|(known, other)| {
                        WORDS
                            .get(usize::from(known % 18))
                            .map_or(other.clone(), |w| (*w).into())
                    })
                    .collect();
                if let Ok(filter) = Filter::parse(&words, &Services::of("")) {
                    filter.admits(&Subject {
                        local: None,
                        peer: None,
                    });
                }
            });
    }
}

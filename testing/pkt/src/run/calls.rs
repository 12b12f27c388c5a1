//! Calls of a script: the agent makes them, and their results are checked here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use portolan_posix_check::call::Errno;

use super::{Player, Stepped};
use crate::agent::{Answer, Value};
use crate::script::{Argument, Base, Call, Comparison, Expression, Family, Field, Outcome};
use crate::segment::pattern;
use crate::wire::now;

/// Returns the flow that a call names.
pub(super) fn flow_name(call: &Call) -> Option<String> {
    let named = matches!(call.name, "connect" | "sendto");
    match call.arguments.get(1) {
        Some(Argument::Words(words)) if named => words.first().filter(|w| *w != "remote").cloned(),
        _ => None,
    }
}

impl Player<'_> {
    /// Has the agent make a call and returns the number of the request.
    pub(super) fn request(&mut self, call: &Call) -> Result<u32, String> {
        let mut values = Vec::new();
        for (index, argument) in call.arguments.iter().enumerate() {
            values.push(self.value(call.name, index, argument)?);
        }
        match (call.name, &mut values[..]) {
            ("connect", [_]) => values.push(Value::Address(self.remote("")?)),
            ("socket", [Value::Words(words)]) if self.family == Family::V6 => {
                words.push("v6".to_owned());
            }
            _ => {}
        }
        let shown = shown(call);
        self.trace.push((now(), format!("  {shown}")));
        self.agent
            .request(call.name, values)
            .map_err(|error| error.to_string())
    }

    fn value(&self, call: &str, index: usize, argument: &Argument) -> Result<Value, String> {
        Ok(match (argument, call, index) {
            (Argument::Words(words), "bind", 1) => Value::Address(self.local(words)?),
            (Argument::Words(words), "connect" | "sendto", 1) => {
                let name = words.first().map(String::as_str).unwrap_or_default();
                Value::Address(self.remote(if name == "remote" { "" } else { name })?)
            }
            (Argument::Words(words), ..) => Value::Words(words.clone()),
            (Argument::Text(text), ..) => Value::Text(text.clone()),
            (Argument::Number(number), ..) => {
                let value = self.scope.evaluate(number, None);
                Value::Number(value.map_err(|unknown| unknown.to_string())?)
            }
        })
    }

    fn remote(&self, name: &str) -> Result<SocketAddr, String> {
        let flow = self.flows.get(name);
        flow.map(|flow| flow.remote)
            .ok_or_else(|| format!("there is no flow {name:?}"))
    }

    /// Resolves `local` (the script's own port), `any` (that port on all addresses) or `ephemeral` (no port).
    fn local(&self, words: &[String]) -> Result<SocketAddr, String> {
        let own = crate::bed::Bed::local(self.family);
        let every: IpAddr = match self.family {
            Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
            Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
        };
        match words.first().map(String::as_str) {
            Some("local") => Ok(SocketAddr::new(own, self.port)),
            Some("any") => Ok(SocketAddr::new(every, self.port)),
            Some("ephemeral") => Ok(SocketAddr::new(own, 0)),
            _ => Err("bind to local, any or ephemeral".to_owned()),
        }
    }

    pub(super) fn judge(&mut self, call: &Call, answer: &Answer, expected: &Outcome) -> Stepped {
        let fd = match call.arguments.first() {
            Some(Argument::Number(number)) => self.scope.evaluate(number, None).ok(),
            _ => None,
        };
        let is_datagram = match call.arguments.first() {
            Some(Argument::Words(words)) => words.iter().any(|word| word == "udp"),
            _ => false,
        };
        if let (Outcome::Named(_), Ok(fd)) = (expected, answer.result) {
            self.datagram_sockets.retain(|other| *other != fd);
            self.read_so_far.insert(fd, Some(0));
            if call.name == "socket" && is_datagram {
                self.datagram_sockets.push(fd);
            }
        }
        self.judge_answer(answer, expected)?;
        let peeks = call.arguments.iter().any(|argument| match argument {
            Argument::Words(words) => words.iter().any(|word| word == "MSG_PEEK"),
            _ => false,
        });
        let tells_stream = matches!(call.name, "recv" | "recvmsg") && expected_is_number(expected);
        match (fd, &answer.data) {
            (Some(fd), Some(data)) if tells_stream => self.check_stream(fd, data, peeks),
            (Some(fd), Some(_)) => {
                // The position in the pattern after other data is unknown.
                self.read_so_far.insert(fd, None);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Checks that data which the script does not specify is the pattern, without a gap.
    fn check_stream(&mut self, fd: i64, data: &[u8], peeks: bool) -> Stepped {
        let Some(first) = data.first() else {
            return Ok(());
        };
        let expected = if self.datagram_sockets.contains(&fd) {
            Some(0)
        } else {
            self.read_so_far.get(&fd).copied().flatten()
        };
        let position = expected.unwrap_or(u64::from(*first));
        let wrong = data
            .iter()
            .zip(position..)
            .position(|(byte, p)| *byte != pattern(p));
        if let Some(at) = wrong {
            return Err(format!("byte {at} of what was received is wrong"));
        }
        if !peeks {
            let next = position + data.len() as u64;
            self.read_so_far.insert(fd, Some(next));
        }
        Ok(())
    }

    pub(super) fn judge_answer(&mut self, answer: &Answer, expected: &Outcome) -> Stepped {
        let got = match &answer.result {
            Ok(number) => number.to_string(),
            Err(errno) => Errno(*errno).to_string(),
        };
        let words = answer.words.join("|");
        self.trace
            .push((answer.ended, format!("  = {got} {words}")));
        let other = || Err(format!("it returned {got} {words}"));
        match (expected, &answer.result) {
            (Outcome::Any, _) | (Outcome::Success, Ok(_)) => Ok(()),
            (Outcome::Named(name), Ok(number)) => {
                self.scope.variables.insert(name.clone(), *number);
                Ok(())
            }
            (Outcome::Number(field), Ok(number)) => self.judge_number(field, *number),
            (Outcome::Errno(name), Err(_)) if *name == got => Ok(()),
            (Outcome::Text(text), Ok(_)) if answer.data.as_ref() == Some(text) => Ok(()),
            (Outcome::Text(_), Ok(_)) => {
                let data = answer.data.as_deref().unwrap_or_default();
                Err(format!("it returned {:?}", String::from_utf8_lossy(data)))
            }
            (Outcome::Words(words), Ok(_)) => {
                let (mut words, mut got) = (words.clone(), answer.words.clone());
                words.retain(|word| word != "nothing");
                words.sort();
                got.sort();
                if words == got { Ok(()) } else { other() }
            }
            _ => other(),
        }
    }

    fn judge_number(&mut self, field: &Field, number: i64) -> Stepped {
        let (comparison, expression) = match field {
            Field::Any => return Ok(()),
            Field::Capture(name) => {
                self.scope.variables.insert(name.clone(), number);
                return Ok(());
            }
            Field::Compare(comparison, expression) => (comparison, expression),
        };
        let expected = self.scope.evaluate(expression, None);
        let expected = expected.map_err(|unknown| unknown.to_string())?;
        if comparison.holds(number, expected) {
            Ok(())
        } else {
            Err(format!("it returned {number}, not {comparison}{expected}"))
        }
    }
}

fn expected_is_number(expected: &Outcome) -> bool {
    matches!(expected, Outcome::Number(_) | Outcome::Success)
}

fn shown(call: &Call) -> String {
    let argument = |argument: &Argument| match argument {
        Argument::Number(expression) => shown_number(expression),
        Argument::Text(text) => format!("{:?}", String::from_utf8_lossy(text)),
        Argument::Words(words) => words.join("|"),
    };
    let arguments: Vec<_> = call.arguments.iter().map(argument).collect();
    format!("{}({})", call.name, arguments.join(", "))
}

fn shown_number(expression: &Expression) -> String {
    let base = match &expression.base {
        Base::Number(number) => number.to_string(),
        Base::Variable(name) => name.clone(),
        Base::Mss => "MSS".to_owned(),
        Base::Timestamp => "TS".to_owned(),
    };
    match expression.plus {
        0 => base,
        plus => format!("{base}{plus:+}"),
    }
}

impl Comparison {
    pub fn holds(self, seen: i64, expected: i64) -> bool {
        match self {
            Comparison::Equal => seen == expected,
            Comparison::NotEqual => seen != expected,
            Comparison::Less => seen < expected,
            Comparison::LessOrEqual => seen <= expected,
            Comparison::Greater => seen > expected,
            Comparison::GreaterOrEqual => seen >= expected,
        }
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Comparison::Equal => "",
            Comparison::NotEqual => "other than ",
            Comparison::Less => "less than ",
            Comparison::LessOrEqual => "at most ",
            Comparison::Greater => "more than ",
            Comparison::GreaterOrEqual => "at least ",
        })
    }
}

//! Parses one line from left to right.

use super::{Base, Comparison, Expression, Field, ParseError};

/// A position in a line.
pub(super) struct Cursor<'a> {
    text: &'a str,
    at: usize,
    line: usize,
}

pub(super) type Parsed<T> = Result<T, ParseError>;

impl<'a> Cursor<'a> {
    pub(super) fn new(text: &'a str, line: usize) -> Cursor<'a> {
        Cursor { text, at: 0, line }
    }

    pub(super) fn error<T>(&self, message: impl Into<String>) -> Parsed<T> {
        Err(ParseError {
            line: self.line,
            column: self.text[..self.at].chars().count() + 1,
            message: message.into(),
        })
    }

    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Skips blanks, and a comment, which extends to the end of the line.
    pub(super) fn skip_blanks(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
        if self.rest().starts_with('#') {
            self.at = self.text.len();
        }
    }

    pub(super) fn is_at_end(&mut self) -> bool {
        self.skip_blanks();
        self.rest().is_empty()
    }

    pub(super) fn expect_end(&mut self) -> Parsed<()> {
        if self.is_at_end() {
            return Ok(());
        }
        self.error(format!("{:?} is too much", self.rest()))
    }

    /// Consumes `token` if it is next.
    pub(super) fn take(&mut self, token: &str) -> bool {
        self.skip_blanks();
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    pub(super) fn expect(&mut self, token: &str) -> Parsed<()> {
        if self.take(token) {
            return Ok(());
        }
        self.error(format!("{token:?} is missing"))
    }

    /// Consumes `word` if it is the next word.
    pub(super) fn take_word(&mut self, word: &str) -> bool {
        let before = self.at;
        if self.word() == Some(word) {
            return true;
        }
        self.at = before;
        false
    }

    /// Consumes letters, digits, `_` and `-`, beginning with a letter.
    pub(super) fn word(&mut self) -> Option<&'a str> {
        self.skip_blanks();
        let rest = self.rest();
        if !rest.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
            return None;
        }
        let belongs = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        Some(self.run(belongs))
    }

    /// As [`Cursor::word`], without `-`, which is an operator after the name of a number.
    fn name(&mut self) -> Option<&'a str> {
        self.skip_blanks();
        if !self.rest().starts_with(|c: char| c.is_ascii_alphabetic()) {
            return None;
        }
        Some(self.run(|c| c.is_ascii_alphanumeric() || c == '_'))
    }

    fn take_name(&mut self, name: &str) -> bool {
        let before = self.at;
        if self.name() == Some(name) {
            return true;
        }
        self.at = before;
        false
    }

    fn expect_name(&mut self) -> Parsed<String> {
        match self.name() {
            Some(name) => Ok(name.to_owned()),
            None => self.error("a name is missing"),
        }
    }

    pub(super) fn expect_word(&mut self, what: &str) -> Parsed<&'a str> {
        match self.word() {
            Some(word) => Ok(word),
            None => self.error(format!("{what} is missing")),
        }
    }

    /// Consumes everything up to the next blank.
    pub(super) fn chunk(&mut self) -> &'a str {
        self.skip_blanks();
        self.run(|c| !c.is_whitespace())
    }

    fn run(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    /// Parses a decimal number, or a hexadecimal one after `0x`, with an optional minus sign.
    pub(super) fn number(&mut self) -> Option<i64> {
        self.skip_blanks();
        let before = self.at;
        let negative = self.take("-");
        let digits = self.run(|c| c.is_ascii_hexdigit() || c == 'x');
        let value = match digits.strip_prefix("0x") {
            Some(hexadecimal) => i64::from_str_radix(hexadecimal, 16),
            None => digits.parse(),
        };
        match value {
            // The digits have no sign, so negation does not overflow.
            Ok(value) => Some(if negative { -value } else { value }),
            Err(_) => {
                self.at = before;
                None
            }
        }
    }

    pub(super) fn expect_number(&mut self, what: &str) -> Parsed<i64> {
        match self.number() {
            Some(number) => Ok(number),
            None => self.error(format!("{what} is missing")),
        }
    }

    /// Parses a number that fits `T`.
    pub(super) fn expect_small<T: TryFrom<i64>>(&mut self, what: &str) -> Parsed<T> {
        let number = self.expect_number(what)?;
        match T::try_from(number) {
            Ok(number) => Ok(number),
            Err(_) => self.error(format!("{number} is no {what}")),
        }
    }

    /// Parses seconds with a fraction.
    pub(super) fn seconds(&mut self) -> Parsed<std::time::Duration> {
        self.skip_blanks();
        let before = self.at;
        let digits = self.run(|c| c.is_ascii_digit() || c == '.');
        // No script takes an hour.
        let seconds = digits.parse().ok().filter(|s| (0.0..3600.0).contains(s));
        match seconds {
            Some(seconds) => Ok(std::time::Duration::from_secs_f64(seconds)),
            None => {
                self.at = before;
                self.error("a time in seconds is missing")
            }
        }
    }

    /// Parses `"…"` with `\n`, `\\`, `\"` and `\xHH`; None if the next character is no quote.
    pub(super) fn text(&mut self) -> Parsed<Option<Vec<u8>>> {
        if !self.take("\"") {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        let mut characters = self.rest().char_indices();
        while let Some((_, c)) = characters.next() {
            let escaped = match c {
                '"' => {
                    self.at += characters.offset();
                    return Ok(Some(bytes));
                }
                '\\' => characters.next().map(|(_, c)| c),
                c => {
                    bytes.extend(c.encode_utf8(&mut [0; 4]).as_bytes());
                    continue;
                }
            };
            match escaped {
                Some('n') => bytes.push(b'\n'),
                Some('x') => {
                    let digits: String = characters.by_ref().take(2).map(|(_, c)| c).collect();
                    match u8::from_str_radix(&digits, 16) {
                        Ok(byte) => bytes.push(byte),
                        Err(_) => return self.error("\\x needs two hexadecimal digits"),
                    }
                }
                Some(c @ ('\\' | '"')) => bytes.push(c as u8),
                _ => return self.error("an unknown escape in a text"),
            }
        }
        self.error("the text has no end")
    }

    /// Parses bytes written as hexadecimal digits.
    pub(super) fn bytes(&mut self) -> Parsed<Vec<u8>> {
        self.skip_blanks();
        let digits = self.run(|c| c.is_ascii_hexdigit());
        if digits.is_empty() || digits.len() % 2 == 1 {
            return self.error("an even number of hexadecimal digits is missing");
        }
        let pairs = digits.as_bytes().chunks(2);
        let value = |digit: u8| char::from(digit).to_digit(16).unwrap_or(0) as u8;
        Ok(pairs
            .map(|pair| value(pair[0]) << 4 | value(pair[1]))
            .collect())
    }

    /// Parses `12`, `$name`, `MSS` or `TS`, each optionally followed by `+3` or `-3`.
    pub(super) fn expression(&mut self) -> Parsed<Option<Expression>> {
        let base = if let Some(number) = self.number() {
            Base::Number(number)
        } else if self.take("$") {
            Base::Variable(self.expect_name()?)
        } else if self.take_name("MSS") {
            Base::Mss
        } else if self.take_name("TS") {
            Base::Timestamp
        } else {
            return Ok(None);
        };
        let sign = match self.rest().as_bytes().first() {
            Some(b'+') => 1,
            Some(b'-') => -1,
            _ => return Ok(Some(Expression { base, plus: 0 })),
        };
        self.at += 1;
        let plus = i64::from(self.expect_small::<u32>("a number")?) * sign;
        Ok(Some(Expression { base, plus }))
    }

    pub(super) fn expect_expression(&mut self, what: &str) -> Parsed<Expression> {
        match self.expression()? {
            Some(expression) => Ok(expression),
            None => self.error(format!("{what} is missing")),
        }
    }

    /// Parses `*`, `12`, `>=12` or `?name`.
    pub(super) fn field(&mut self, what: &str) -> Parsed<Field> {
        if self.take("*") {
            return Ok(Field::Any);
        }
        if self.take("?") {
            return Ok(Field::Capture(self.expect_name()?));
        }
        // Longer tokens first.
        let comparisons = [
            (">=", Comparison::GreaterOrEqual),
            ("<=", Comparison::LessOrEqual),
            ("!=", Comparison::NotEqual),
            (">", Comparison::Greater),
            ("<", Comparison::Less),
        ];
        let found = comparisons.into_iter().find(|(sign, _)| self.take(sign));
        let comparison = found.map_or(Comparison::Equal, |(_, comparison)| comparison);
        Ok(Field::Compare(comparison, self.expect_expression(what)?))
    }
}

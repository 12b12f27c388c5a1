//! Tables of any kind of row: columns with their cells, sorted and filtered as the user chooses.

use std::cmp::Ordering;

/// One column of a table about rows of type `T`.
pub(super) struct Column<T> {
    head: &'static str,
    content: Content<T>,
    /// Narrow terminals leave out the columns with the highest rank first; columns of rank 0 stay.
    rank: u8,
    tone: fn(f64) -> Tone,
}

enum Content<T> {
    Text(fn(&T) -> String),
    Number(fn(&T) -> f64, fn(f64) -> String),
    /// A number in a unit that depends on the row.
    Amount(fn(&T) -> f64, fn(&T) -> String),
    /// NaN if there is no whole.
    Share(fn(&T) -> f64),
}

/// What a value means to the reader; the screen shows it as a colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tone {
    #[default]
    Plain,
    Good,
    Warning,
    Alarm,
}

impl<T> Column<T> {
    pub(super) const fn text(head: &'static str, rank: u8, of: fn(&T) -> String) -> Column<T> {
        Column::new(head, rank, Content::Text(of))
    }

    pub(super) const fn number(
        head: &'static str,
        rank: u8,
        of: fn(&T) -> f64,
        shown: fn(f64) -> String,
    ) -> Column<T> {
        Column::new(head, rank, Content::Number(of, shown))
    }

    pub(super) const fn amount(
        head: &'static str,
        rank: u8,
        of: fn(&T) -> f64,
        shown: fn(&T) -> String,
    ) -> Column<T> {
        Column::new(head, rank, Content::Amount(of, shown))
    }

    /// A share of a whole, which the screen shows as a bar.
    pub(super) const fn share(head: &'static str, rank: u8, of: fn(&T) -> f64) -> Column<T> {
        Column::new(head, rank, Content::Share(of)).with_tone(tone_of_share)
    }

    pub(super) const fn with_tone(mut self, tone: fn(f64) -> Tone) -> Column<T> {
        self.tone = tone;
        self
    }

    const fn new(head: &'static str, rank: u8, content: Content<T>) -> Column<T> {
        Column {
            head,
            content,
            rank,
            tone: |_| Tone::Plain,
        }
    }

    pub(super) const fn head(&self) -> &'static str {
        self.head
    }

    fn heading(&self) -> Heading {
        Heading {
            head: self.head,
            kind: match self.content {
                Content::Text(_) => Kind::Text,
                Content::Number(..) | Content::Amount(..) => Kind::Number,
                Content::Share(_) => Kind::Bar,
            },
            rank: self.rank,
        }
    }

    fn cell(&self, row: &T) -> Cell {
        let (text, value) = match self.content {
            Content::Text(of) => (of(row), 0.0),
            Content::Number(of, shown) => (shown(of(row)), of(row)),
            Content::Amount(of, shown) => (shown(row), of(row)),
            Content::Share(of) => (whole_percent(of(row)), of(row)),
        };
        Cell {
            text: text.trim_end().to_owned(),
            tone: (self.tone)(value),
            value,
        }
    }

    /// The highest numbers first, texts in the order of the alphabet.
    fn compare(&self, one: &T, other: &T) -> Ordering {
        match self.content {
            Content::Text(of) => of(one).cmp(&of(other)),
            Content::Number(of, _) | Content::Amount(of, _) | Content::Share(of) => {
                let value = |row| if of(row).is_nan() { -1.0 } else { of(row) };
                value(other).total_cmp(&value(one))
            }
        }
    }
}

/// Alarms at any value but 0.
pub(super) fn alarm_if_any(value: f64) -> Tone {
    if value > 0.0 {
        Tone::Alarm
    } else {
        Tone::Plain
    }
}

/// Warns at any value but 0.
pub(super) fn warn_if_any(value: f64) -> Tone {
    if value > 0.0 {
        Tone::Warning
    } else {
        Tone::Plain
    }
}

fn tone_of_share(share: f64) -> Tone {
    match share {
        _ if share >= 0.995 => Tone::Alarm,
        _ if share >= 0.8 => Tone::Warning,
        _ => Tone::Good,
    }
}

/// The order and the choice of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrangement {
    /// None: as the rows come, the busiest first.
    pub sorted_by: Option<usize>,
    pub is_reversed: bool,
    /// Rows without this text are left out, in any case of letters.
    pub filter: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sheet {
    pub headings: Vec<Heading>,
    pub rows: Vec<Vec<Cell>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heading {
    pub head: &'static str,
    pub kind: Kind,
    pub rank: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Number,
    Bar,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cell {
    pub text: String,
    pub tone: Tone,
    /// The number that the text shows; of a bar, the filled part.
    pub value: f64,
}

impl Sheet {
    pub(super) fn of<T>(columns: &[Column<T>], rows: &[T], arrangement: &Arrangement) -> Sheet {
        let mut order: Vec<&T> = rows.iter().collect();
        if let Some(column) = arrangement.sorted_by.and_then(|index| columns.get(index)) {
            order.sort_by(|one, other| column.compare(one, other));
        }
        if arrangement.is_reversed {
            order.reverse();
        }
        let cells = |row| columns.iter().map(|column| column.cell(row)).collect();
        let filter = arrangement.filter.to_lowercase();
        let has_text = |cells: &Vec<Cell>| {
            let mut texts = cells.iter().map(|cell| cell.text.to_lowercase());
            filter.is_empty() || texts.any(|text| text.contains(&filter))
        };
        Sheet {
            headings: columns.iter().map(Column::heading).collect(),
            rows: order.into_iter().map(cells).filter(has_text).collect(),
        }
    }

    /// Returns the table in the style of ss(8).
    pub(super) fn lines(&self) -> Vec<String> {
        let heads: Vec<&str> = self.headings.iter().map(|heading| heading.head).collect();
        let texts = |row: &Vec<Cell>| row.iter().map(|cell| cell.text.clone()).collect();
        let rows: Vec<Vec<String>> = self.rows.iter().map(texts).collect();
        crate::table::lines(&heads, &rows)
    }
}

/// Formats a value with three digits and a prefix.
pub(super) fn scaled(value: f64) -> String {
    const PREFIXES: [&str; 5] = ["", "k", "M", "G", "T"];
    if value.is_infinite() {
        return "-".to_owned();
    }
    // The sum of an empty list is -0.
    let mut value = value + 0.0;
    let mut prefix = 0;
    while value >= 999.5 && prefix + 1 < PREFIXES.len() {
        value /= 1000.0;
        prefix += 1;
    }
    let digits = match value {
        _ if value == value.trunc() => 0,
        _ if value < 9.995 => 2,
        _ if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {}", PREFIXES[prefix])
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

fn whole_percent(share: f64) -> String {
    if share.is_nan() {
        return "-".to_owned();
    }
    format!("{:.0}%", share * 100.0 + 0.0)
}

pub(super) fn count(value: f64) -> String {
    format!("{value:.0}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column<(&str, f64)>; 2] = [
        Column::text("Name", 0, |row| row.0.to_owned()),
        Column::number("Drops", 0, |row: &(&str, f64)| row.1, count).with_tone(alarm_if_any),
    ];
    const ROWS: [(&str, f64); 3] = [("nginx", 2.0), ("redis", 0.0), ("Apache", 7.0)];

    fn names(sorted_by: Option<usize>, is_reversed: bool, filter: &str) -> Vec<String> {
        let arrangement = Arrangement {
            sorted_by,
            is_reversed,
            filter: filter.to_owned(),
        };
        let sheet = Sheet::of(&COLUMNS, &ROWS, &arrangement);
        sheet.rows.iter().map(|row| row[0].text.clone()).collect()
    }

    #[test]
    fn numbers_fall_and_texts_rise_unless_reversed() {
        assert_eq!(names(None, false, ""), ["nginx", "redis", "Apache"]);
        assert_eq!(names(None, true, ""), ["Apache", "redis", "nginx"]);
        assert_eq!(names(Some(0), false, ""), ["Apache", "nginx", "redis"]);
        assert_eq!(names(Some(1), false, ""), ["Apache", "nginx", "redis"]);
        assert_eq!(names(Some(1), true, ""), ["redis", "nginx", "Apache"]);
        assert_eq!(names(Some(9), false, ""), ["nginx", "redis", "Apache"]);
    }

    #[test]
    fn a_filter_finds_text_in_any_column() {
        assert_eq!(names(None, false, "A"), ["Apache"]);
        assert_eq!(names(None, false, "7"), ["Apache"]);
        assert_eq!(names(None, false, "i"), ["nginx", "redis"]);
        assert_eq!(names(None, false, "nothing"), [""; 0]);
    }

    #[test]
    fn tones_follow_values() {
        let sheet = Sheet::of(&COLUMNS, &ROWS, &Arrangement::default());
        let tones: Vec<_> = sheet.rows.iter().map(|row| row[1].tone).collect();
        assert_eq!(tones, [Tone::Alarm, Tone::Plain, Tone::Alarm]);
        assert_eq!(
            [0.5, 0.9, 1.2].map(tone_of_share),
            [Tone::Good, Tone::Warning, Tone::Alarm]
        );
    }

    #[test]
    fn numbers_have_three_digits_and_a_prefix() {
        for (value, text) in [
            (0.0, "0"),
            (-0.0, "0"),
            (0.5, "0.50"),
            (12.34, "12.3"),
            (999.4, "999"),
            (999.6, "1.00 k"),
            (40e6, "40 M"),
            (1.234e9, "1.23 G"),
            (5e15, "5000 T"),
            (f64::INFINITY, "-"),
        ] {
            assert_eq!(scaled(value).trim_end(), text);
        }
    }
}

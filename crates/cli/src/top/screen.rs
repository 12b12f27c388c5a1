//! Draws the state of the screen into a frame of any size.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Span;
use ratatui::widgets::{Paragraph, Widget, Wrap};

use super::app::{App, Mode};
use super::sheet::{Cell, Heading, Kind, Sheet, Tone};
use super::tabs::{Tab, summary};

/// Whether values that need attention are coloured, or only bold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Palette {
    Coloured,
    /// As NO_COLOR demands (<https://no-color.org>).
    Plain,
}

impl Palette {
    pub(super) fn of_environment() -> Palette {
        match std::env::var_os("NO_COLOR") {
            Some(value) if !value.is_empty() => Palette::Plain,
            _ => Palette::Coloured,
        }
    }

    fn style(self, tone: Tone) -> Style {
        let colour = match tone {
            Tone::Plain => return Style::new(),
            Tone::Good => Color::Green,
            Tone::Warning => Color::Yellow,
            Tone::Alarm => Color::Red,
        };
        let weight = match tone {
            Tone::Alarm => Modifier::BOLD,
            _ => Modifier::empty(),
        };
        match self {
            Palette::Coloured => Style::new().fg(colour).add_modifier(weight),
            Palette::Plain => Style::new().add_modifier(weight),
        }
    }
}

/// Columns are separated by this many cells.
const GAP: usize = 1;

/// Texts are not cut to less than this to make room.
const SHORTEST_TEXT: usize = 8;

const SHORTEST_BAR: usize = 8;
const LONGEST_BAR: usize = 40;

pub(super) fn draw(frame: &mut Frame<'_>, app: &mut App, palette: Palette) {
    let area = frame.area();
    let buffer = frame.buffer_mut();
    let mut rows = Rows { area, next: 0 };
    draw_summary(buffer, &mut rows, app, palette);
    draw_tabs(buffer, &mut rows, app.tab());
    if app.mode == Mode::Help {
        let help = Paragraph::new(HELP).wrap(Wrap { trim: false });
        return help.render(rows.rest(), buffer);
    }
    let Some(view) = app.view() else {
        return;
    };
    let sheet = app.tab().sheet(view, &app.arrangement());
    // The last row is the footer's.
    let room = rows.left().saturating_sub(1);
    draw_table(buffer, &mut rows, app, &sheet, room, palette);
    let footer = Rows {
        area,
        next: area.height.saturating_sub(1).max(rows.next),
    };
    draw_footer(buffer, footer, app);
}

/// The rows of the screen, from the top.
struct Rows {
    area: Rect,
    next: u16,
}

impl Rows {
    fn left(&self) -> usize {
        usize::from(self.area.height.saturating_sub(self.next))
    }

    fn width(&self) -> usize {
        usize::from(self.area.width)
    }

    fn rest(&self) -> Rect {
        Rect {
            y: self.area.y + self.next,
            height: self.area.height.saturating_sub(self.next),
            ..self.area
        }
    }

    /// Returns the next row; None at the end of the screen.
    fn take(&mut self) -> Option<u16> {
        let row = (self.left() > 0).then_some(self.area.y + self.next)?;
        self.next += 1;
        Some(row)
    }

    fn print(&mut self, buffer: &mut Buffer, text: &str, style: Style) {
        if let Some(y) = self.take() {
            buffer.set_stringn(self.area.x, y, text, self.width(), style);
        }
    }
}

/// Shows totals, in as many lines as they take, or why there are no figures.
fn draw_summary(buffer: &mut Buffer, rows: &mut Rows, app: &App, palette: Palette) {
    let parts = match (&app.error, app.view()) {
        (Some(error), _) => {
            let alarm = palette.style(Tone::Alarm);
            return rows.print(buffer, error, alarm);
        }
        (None, None) => vec!["measuring".to_owned()],
        (None, Some(view)) => summary(view),
    };
    for line in broken(&parts, rows.width()) {
        rows.print(buffer, &line, Style::new().add_modifier(Modifier::BOLD));
    }
}

/// Joins parts by commas to lines of a width.
fn broken(parts: &[String], width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for part in parts {
        match lines.last_mut() {
            Some(line) if line.len() + 2 + part.len() <= width => {
                line.push_str(", ");
                line.push_str(part);
            }
            _ => lines.push(part.clone()),
        }
    }
    lines
}

/// Names all tables, if necessary by the beginnings of their names.
fn draw_tabs(buffer: &mut Buffer, rows: &mut Rows, present: Tab) {
    let title = |tab: Tab, letters: usize| {
        let name: String = tab.name().chars().take(letters).collect();
        format!(" {} {name} ", tab as usize + 1)
    };
    let width_with = |letters| -> usize {
        let titles = Tab::ALL.into_iter().map(|tab| title(tab, letters).len());
        titles.sum()
    };
    let longest = (1..=12)
        .rev()
        .find(|&letters| width_with(letters) <= rows.width());
    let right = rows.area.right();
    let mut x = rows.area.x;
    let Some(y) = rows.take() else {
        return;
    };
    for tab in Tab::ALL {
        let style = if tab == present {
            Style::new().add_modifier(Modifier::REVERSED)
        } else {
            Style::new()
        };
        let room = usize::from(right.saturating_sub(x));
        let text = title(tab, longest.unwrap_or(1));
        if x < right {
            (x, _) = buffer.set_stringn(x, y, text, room, style);
        }
    }
}

/// Draws the heads and the visible rows of a table, at most `room` lines.
fn draw_table(
    buffer: &mut Buffer,
    rows: &mut Rows,
    app: &mut App,
    sheet: &Sheet,
    room: usize,
    palette: Palette,
) {
    let Some(page) = room.checked_sub(1) else {
        return;
    };
    let slots = fit(sheet, rows.width());
    let order = app.arrangement();
    let mark = if order.is_reversed { '^' } else { 'v' };
    if let Some(y) = rows.take() {
        let mut line = Line::new(rows, y);
        for slot in &slots {
            let heading = sheet.headings[slot.column];
            let head = if order.sorted_by == Some(slot.column) {
                format!("{}{mark}", heading.head)
            } else {
                heading.head.to_owned()
            };
            let emphasis = Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED);
            line.print(buffer, heading.kind, slot.width, &head, emphasis);
        }
    }
    let visible = app.visible(sheet, page);
    for row in &sheet.rows[visible] {
        let Some(y) = rows.take() else {
            return;
        };
        let mut line = Line::new(rows, y);
        for slot in &slots {
            let cell = &row[slot.column];
            let style = palette.style(cell.tone);
            match sheet.headings[slot.column].kind {
                Kind::Bar => line.draw_bar(buffer, slot.width, cell, style),
                kind => line.print(buffer, kind, slot.width, &cell.text, style),
            }
        }
    }
}

/// A column that has room on the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    column: usize,
    width: usize,
}

/// Chooses columns for a width: leaves out those of the highest rank, cuts texts, and gives the rest to bars.
fn fit(sheet: &Sheet, width: usize) -> Vec<Slot> {
    let headings = &sheet.headings;
    let mut slots: Vec<Slot> = (0..headings.len())
        .map(|column| Slot {
            column,
            width: natural_width(sheet, column),
        })
        .collect();
    let used = |slots: &[Slot]| {
        let gaps = GAP * slots.len().saturating_sub(1);
        slots.iter().map(|slot| slot.width).sum::<usize>() + gaps
    };
    while used(&slots) > width {
        let rank = |slot: &Slot| headings[slot.column].rank;
        let last = slots.iter().map(rank).max().unwrap_or(0);
        if last == 0 {
            break;
        }
        slots.retain(|slot| rank(slot) < last);
    }
    let excess = used(&slots).saturating_sub(width);
    let texts = slots
        .iter_mut()
        .filter(|slot| headings[slot.column].kind == Kind::Text);
    if let Some(longest) = texts.max_by_key(|slot| slot.width) {
        longest.width =
            (longest.width.saturating_sub(excess)).max(SHORTEST_TEXT.min(longest.width));
    }
    let spare = width.saturating_sub(used(&slots));
    let mut bars = slots
        .iter_mut()
        .filter(|slot| headings[slot.column].kind == Kind::Bar);
    if let Some(bar) = bars.next() {
        bar.width = (bar.width + spare).min(LONGEST_BAR);
    }
    slots
}

/// Returns the width that shows all cells of a column in full. A head has room for the mark of the order.
fn natural_width(sheet: &Sheet, column: usize) -> usize {
    let Heading { head, kind, .. } = sheet.headings[column];
    if kind == Kind::Bar {
        return SHORTEST_BAR;
    }
    let widths = sheet.rows.iter().map(|row| text_width(&row[column].text));
    widths.max().unwrap_or(0).max(text_width(head) + 1)
}

fn text_width(text: &str) -> usize {
    Span::raw(text).width()
}

/// A line of a table, from the left.
struct Line {
    x: u16,
    y: u16,
    right: u16,
}

impl Line {
    fn new(rows: &Rows, y: u16) -> Line {
        Line {
            x: rows.area.x,
            y,
            right: rows.area.right(),
        }
    }

    /// Prints a cell: numbers at the right, other texts at the left, with a `+` where they are cut.
    fn print(&mut self, buffer: &mut Buffer, kind: Kind, width: usize, text: &str, style: Style) {
        let length = text_width(text);
        let indent = match kind {
            Kind::Number => width.saturating_sub(length),
            Kind::Text | Kind::Bar => 0,
        };
        self.put(buffer, indent, text, width - indent, style);
        if length > width {
            self.put(buffer, width.saturating_sub(1), "+", 1, style);
        }
        self.advance(width);
    }

    /// Draws a bar with its text at the right end, as far as the value fills it.
    fn draw_bar(&mut self, buffer: &mut Buffer, width: usize, cell: &Cell, style: Style) {
        let inner = width.saturating_sub(2);
        let share = if cell.value.is_nan() { 0.0 } else { cell.value };
        let filled = (share.clamp(0.0, 1.0) * inner as f64).round() as usize;
        let bar = format!("{:<inner$}", "|".repeat(filled));
        let text_at = inner.saturating_sub(cell.text.len());
        let shown: String = bar.chars().take(text_at).chain(cell.text.chars()).collect();
        self.put(buffer, 0, "[", 1, Style::new());
        self.put(buffer, 1, &shown, inner, style);
        self.put(buffer, inner + 1, "]", 1, Style::new());
        self.advance(width);
    }

    /// Prints within the screen.
    fn put(&self, buffer: &mut Buffer, indent: usize, text: &str, width: usize, style: Style) {
        let x = usize::from(self.x) + indent;
        if x < usize::from(self.right) {
            buffer.set_stringn(x as u16, self.y, text, width, style);
        }
    }

    fn advance(&mut self, width: usize) {
        let step = u16::try_from(width + GAP).unwrap_or(u16::MAX);
        self.x = self.x.saturating_add(step);
    }
}

fn draw_footer(buffer: &mut Buffer, mut rows: Rows, app: &App) {
    let mut parts = Vec::new();
    match app.mode {
        Mode::Filter(_) => parts.push(format!("filter: {}_", app.filter())),
        _ if !app.filter().is_empty() => parts.push(format!("filter: {}", app.filter())),
        _ => {}
    }
    if app.is_paused {
        parts.push("PAUSED".to_owned());
    }
    parts.push("q quit  h help  / filter  < > sort  r reverse  p pause".to_owned());
    let style = Style::new().add_modifier(Modifier::DIM);
    rows.print(buffer, &parts.join("  "), style);
}

const HELP: &str = "\
1 to 5, Tab: the table: processes, sessions, users, links, guarantees
< >, left, right: the column to sort by; none: the busiest first
r: reverse the order
up, down, j, k, Page Up, Page Down, Home, End: scroll
/: show rows with a text; Enter takes it, Esc clears it
p, space: pause, and go on
Ctrl-Z: stop, as other programs
q, Ctrl-C: quit

Red: packets are dropped, or all of a guarantee is used. Yellow: segments are retransmitted, or more than 80% is \
used. Rates are per second.

Any key leaves this help.";

#[cfg(test)]
mod tests;

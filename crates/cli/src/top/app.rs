//! The state of the screen, and what keys do to it. No terminal is involved.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::sheet::{Arrangement, Sheet};
use super::tabs::Tab;
use super::view::View;

/// What the caller does after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    GoOn,
    /// Ctrl-Z: as the shell expects of all programs.
    Stop,
    Quit,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Table,
    Help,
    /// The filter is being typed; the former filter, for Esc.
    Filter(String),
}

/// Sort order and scroll position of one table.
#[derive(Clone, Copy, Debug, Default)]
struct TabState {
    sorted_by: Option<usize>,
    is_reversed: bool,
    offset: usize,
}

/// The state of the screen.
pub(super) struct App {
    tab: Tab,
    tabs: [TabState; Tab::ALL.len()],
    /// Of all tables.
    filter: String,
    pub mode: Mode,
    pub is_paused: bool,
    /// None until rates are known.
    view: Option<View>,
    /// Why the last snapshot failed.
    pub error: Option<String>,
    /// Rows that fit on the screen, known when it is drawn.
    page: usize,
}

impl App {
    /// Starts with a table in an order.
    pub(super) fn new(tab: Tab, arrangement: &Arrangement) -> App {
        let mut app = App {
            tab,
            tabs: Default::default(),
            filter: arrangement.filter.clone(),
            mode: Mode::Table,
            is_paused: false,
            view: None,
            error: None,
            page: 1,
        };
        app.state().sorted_by = arrangement.sorted_by;
        app.state().is_reversed = arrangement.is_reversed;
        app
    }

    /// Takes new figures, unless the screen is paused.
    pub(super) fn show(&mut self, view: View) {
        self.error = None;
        if !self.is_paused {
            self.view = Some(view);
        }
    }

    pub(super) fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    pub(super) fn tab(&self) -> Tab {
        self.tab
    }

    pub(super) fn arrangement(&self) -> Arrangement {
        let state = self.tabs[self.tab as usize];
        Arrangement {
            sorted_by: state.sorted_by,
            is_reversed: state.is_reversed,
            filter: self.filter.clone(),
        }
    }

    pub(super) fn filter(&self) -> &str {
        &self.filter
    }

    /// Returns the rows of the present table that are visible on a screen with room for `page` rows.
    pub(super) fn visible(&mut self, sheet: &Sheet, page: usize) -> std::ops::Range<usize> {
        self.page = page.max(1);
        let count = sheet.rows.len();
        let state = self.state();
        state.offset = state.offset.min(count.saturating_sub(page));
        state.offset..count.min(state.offset + page)
    }

    pub(super) fn on_key(&mut self, key: KeyEvent) -> Next {
        if key.kind == KeyEventKind::Release {
            return Next::GoOn;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Next::Quit,
                KeyCode::Char('z') => Next::Stop,
                _ => Next::GoOn,
            };
        }
        match &self.mode {
            Mode::Help => {
                self.mode = Mode::Table;
                Next::GoOn
            }
            Mode::Filter(_) => self.on_filter_key(key.code),
            Mode::Table => self.on_table_key(key.code),
        }
    }

    fn on_filter_key(&mut self, code: KeyCode) -> Next {
        match code {
            KeyCode::Char(letter) => self.filter.push(letter),
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Enter => self.mode = Mode::Table,
            KeyCode::Esc => {
                if let Mode::Filter(former) = std::mem::replace(&mut self.mode, Mode::Table) {
                    self.filter = former;
                }
            }
            _ => {}
        }
        Next::GoOn
    }

    fn on_table_key(&mut self, code: KeyCode) -> Next {
        match code {
            KeyCode::Char('q') => return Next::Quit,
            KeyCode::Char('h' | '?') => self.mode = Mode::Help,
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            KeyCode::Char('/') => self.mode = Mode::Filter(self.filter.clone()),
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('r' | 'R') => self.state().is_reversed ^= true,
            KeyCode::Char('>' | '.') | KeyCode::Right => self.sort_by_next(1),
            KeyCode::Char('<' | ',') | KeyCode::Left => self.sort_by_next(-1),
            KeyCode::Char(digit @ '1'..='5') => self.tab = Tab::ALL[digit as usize - '1' as usize],
            KeyCode::Tab => self.go_to_tab(1),
            KeyCode::BackTab => self.go_to_tab(Tab::ALL.len() - 1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll(-1),
            KeyCode::Down | KeyCode::Char('j') => self.scroll(1),
            KeyCode::PageUp => self.scroll(-(self.page as isize)),
            KeyCode::PageDown => self.scroll(self.page as isize),
            KeyCode::Home | KeyCode::Char('g') => self.state().offset = 0,
            // Limited to the rows that there are when they are drawn.
            KeyCode::End | KeyCode::Char('G') => self.state().offset = usize::MAX / 2,
            _ => {}
        }
        Next::GoOn
    }

    /// The columns follow each other in a circle, with the order of the rows as they come as one more.
    fn sort_by_next(&mut self, step: isize) {
        let orders = self.tab.heads().len() as isize + 1;
        let state = self.state();
        let present = state.sorted_by.map_or(0, |column| column as isize + 1);
        state.sorted_by = ((present + step).rem_euclid(orders) as usize).checked_sub(1);
    }

    fn go_to_tab(&mut self, step: usize) {
        self.tab = Tab::ALL[(self.tab as usize + step) % Tab::ALL.len()];
    }

    fn scroll(&mut self, rows: isize) {
        let state = self.state();
        state.offset = state.offset.saturating_add_signed(rows);
    }

    fn state(&mut self) -> &mut TabState {
        &mut self.tabs[self.tab as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn app() -> App {
        App::new(Tab::Processes, &Arrangement::default())
    }

    fn press(app: &mut App, codes: impl IntoIterator<Item = KeyCode>) {
        for code in codes {
            assert_eq!(app.on_key(code.into()), Next::GoOn, "{code:?}");
        }
    }

    fn letters(text: &str) -> impl Iterator<Item = KeyCode> {
        text.chars().map(KeyCode::Char)
    }

    #[test]
    fn digits_and_tab_choose_the_table() {
        let mut app = app();
        press(&mut app, letters("4"));
        assert_eq!(app.tab(), Tab::Links);
        press(&mut app, [KeyCode::Tab, KeyCode::Tab]);
        assert_eq!(app.tab(), Tab::Processes);
        press(&mut app, [KeyCode::BackTab]);
        assert_eq!(app.tab(), Tab::Guarantees);
    }

    #[test]
    fn each_table_has_an_order_of_its_own() {
        let mut app = app();
        press(&mut app, letters(">>r"));
        let of_processes = app.arrangement();
        assert_eq!(of_processes.sorted_by, Some(1));
        assert!(of_processes.is_reversed);
        press(&mut app, letters("2"));
        assert_eq!(app.arrangement(), Arrangement::default());
        press(&mut app, letters("<"));
        let last = Tab::Sessions.heads().len() - 1;
        assert_eq!(app.arrangement().sorted_by, Some(last));
        press(&mut app, letters(">1"));
        assert_eq!(app.arrangement(), of_processes);
    }

    #[test]
    fn a_filter_is_taken_by_enter_and_undone_by_escape() {
        let mut app = app();
        press(&mut app, letters("/qr"));
        press(&mut app, [KeyCode::Backspace, KeyCode::Enter]);
        assert_eq!((app.filter(), &app.mode), ("q", &Mode::Table));
        press(&mut app, letters("/x"));
        press(&mut app, [KeyCode::Esc]);
        assert_eq!((app.filter(), &app.mode), ("q", &Mode::Table));
        press(&mut app, [KeyCode::Esc]);
        assert_eq!(app.filter(), "");
    }

    #[test]
    fn any_key_leaves_the_help_and_control_c_ends_it_all() {
        let mut app = app();
        press(&mut app, letters("hq"));
        assert_eq!(app.mode, Mode::Table);
        assert_eq!(app.on_key(KeyCode::Char('q').into()), Next::Quit);
        let control = |letter| KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL);
        press(&mut app, letters("/"));
        assert_eq!(app.on_key(control('z')), Next::Stop);
        assert_eq!(app.on_key(control('c')), Next::Quit);
    }

    #[test]
    fn scrolling_ends_at_both_ends() {
        let mut app = app();
        let sheet = Sheet {
            headings: Vec::new(),
            rows: vec![Vec::new(); 10],
        };
        assert_eq!(app.visible(&sheet, 4), 0..4);
        press(&mut app, [KeyCode::Down, KeyCode::PageDown]);
        assert_eq!(app.visible(&sheet, 4), 5..9);
        press(&mut app, [KeyCode::PageDown]);
        assert_eq!(app.visible(&sheet, 4), 6..10);
        press(&mut app, [KeyCode::End]);
        assert_eq!(app.visible(&sheet, 4), 6..10);
        press(&mut app, [KeyCode::Up]);
        assert_eq!(app.visible(&sheet, 4), 5..9);
        press(&mut app, [KeyCode::Home, KeyCode::Up]);
        assert_eq!(app.visible(&sheet, 4), 0..4);
        assert_eq!(app.visible(&sheet, 0), 0..0);
        assert_eq!(app.visible(&sheet, 20), 0..10);
    }
}

//! `portolan top` on a terminal. One thread reads keys, one takes snapshots, one waits for signals; this one draws. The
//! terminal is restored however the program ends, except by SIGKILL.

use std::io::{self, Stdout};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{self, Event, KeyEvent};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use super::app::{App, Next};
use super::screen::{Palette, draw};
use super::view::View;
use super::{Arguments, Look};
use crate::ServerAddress;
use crate::exit::Failure;

/// Limits the wait for the first rates.
const FIRST_DELAY: Duration = Duration::from_millis(250);

/// What the other threads report.
enum Message {
    Key(KeyEvent),
    Resized,
    Look(Result<Box<Look>, Failure>),
    Signal(i32),
    /// No more keys can be read.
    Deaf(io::Error),
}

/// Shows screens until the user quits, or for as many as the arguments say.
pub(super) fn run(arguments: &Arguments, mut app: App, first: Look) -> Result<(), Failure> {
    let (sender, messages) = channel();
    // Before the terminal changes, so that no signal leaves it so.
    let signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGCONT])?;
    let mut screen = Screen::enter()?;
    let to = sender.clone();
    thread::spawn(move || forward_signals(signals, &to));
    let to = sender.clone();
    thread::spawn(move || forward_keys(&to));
    let (server, delay) = (arguments.server.clone(), arguments.delay);
    thread::spawn(move || take_looks(&server, delay, &sender));
    screen.draw(&mut app)?;
    let ended_by = follow(
        &messages,
        &mut screen,
        &mut app,
        first,
        arguments.iterations,
    );
    drop(screen);
    match ended_by? {
        Some(signal) => Ok(emulate_default_handler(signal)?),
        None => Ok(()),
    }
}

/// Returns the signal that ends the program, if one does.
fn follow(
    messages: &Receiver<Message>,
    screen: &mut Screen,
    app: &mut App,
    mut before: Look,
    mut left: Option<u64>,
) -> Result<Option<i32>, Failure> {
    for message in messages {
        match message {
            Message::Resized => {}
            Message::Key(key) => match app.on_key(key) {
                Next::GoOn => {}
                Next::Quit => return Ok(None),
                Next::Stop => screen.stop()?,
            },
            Message::Look(Ok(now)) => {
                app.show(View::between(&before, &now));
                before = *now;
                left = left.map(|left| left - 1);
            }
            // The server may be restarting.
            Message::Look(Err(failure)) => app.error = Some(failure.to_string()),
            Message::Signal(SIGTSTP) => screen.stop()?,
            Message::Signal(SIGCONT) => screen.resume()?,
            Message::Signal(signal) => return Ok(Some(signal)),
            Message::Deaf(error) => return Err(error.into()),
        }
        screen.draw(app)?;
        if left == Some(0) {
            return Ok(None);
        }
    }
    Ok(None)
}

fn forward_signals(mut signals: Signals, to: &Sender<Message>) {
    for signal in signals.forever() {
        if to.send(Message::Signal(signal)).is_err() {
            return;
        }
    }
}

fn forward_keys(to: &Sender<Message>) {
    loop {
        let message = match event::read() {
            Ok(Event::Key(key)) => Message::Key(key),
            Ok(Event::Resize(..)) => Message::Resized,
            Ok(_) => continue,
            Err(error) => Message::Deaf(error),
        };
        let is_last = matches!(message, Message::Deaf(_));
        if to.send(message).is_err() || is_last {
            return;
        }
    }
}

fn take_looks(server: &ServerAddress, delay: Duration, to: &Sender<Message>) {
    let mut next = delay.min(FIRST_DELAY);
    loop {
        thread::sleep(next);
        let look = Look::take(server).map(Box::new);
        if to.send(Message::Look(look)).is_err() {
            return;
        }
        next = delay;
    }
}

/// The terminal in raw mode, with the alternate screen, until this is dropped. A panic restores it, too: ratatui's hook
/// runs before the message is printed.
struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    palette: Palette,
    is_stopped: bool,
}

impl Screen {
    fn enter() -> io::Result<Screen> {
        let entered = ratatui::try_init().map(|terminal| Screen {
            terminal,
            palette: Palette::of_environment(),
            is_stopped: false,
        });
        if entered.is_err() {
            leave();
        }
        entered
    }

    fn draw(&mut self, app: &mut App) -> io::Result<()> {
        if !self.is_stopped {
            let palette = self.palette;
            self.terminal.draw(|frame| draw(frame, app, palette))?;
        }
        Ok(())
    }

    /// Stops the program as job control does, with the shell's screen.
    fn stop(&mut self) -> io::Result<()> {
        self.is_stopped = true;
        self.terminal.show_cursor()?;
        leave();
        emulate_default_handler(SIGTSTP)
    }

    /// Continues after SIGCONT. The shell may have changed the terminal's mode, so that it is set anew.
    fn resume(&mut self) -> io::Result<()> {
        disable_raw_mode()?;
        enable_raw_mode()?;
        execute!(io::stdout(), EnterAlternateScreen, Clear(ClearType::All))?;
        // Draws all of the next screen. Terminal::clear() would ask for the cursor's position, and the thread that reads
        // keys would get the answer.
        self.terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        self.is_stopped = false;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        leave();
    }
}

/// Fails if the terminal is gone, in which case nothing is left to restore.
fn leave() {
    let _ = ratatui::try_restore();
}

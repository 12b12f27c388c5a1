//! Sleeping on several words of memory (`futex_waitv`, since Linux 5.16).

use std::sync::atomic::AtomicU32;

use rustix::io::Errno;
use rustix::thread::ClockId;
use rustix::thread::futex::{self, Flags, Wait, WaitFlags, WaitPtr, WaitvFlags};

/// Maximum number of words that a thread can sleep on.
pub const MOST: usize = 16;

/// Which threads may wake a sleeper on a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Threads of this process.
    Private,
    /// All processes that share the memory.
    Shared,
}

/// A word, and its value while nothing has changed.
#[derive(Clone, Copy, Debug)]
pub struct Word<'a> {
    word: &'a AtomicU32,
    still: u32,
    scope: Scope,
}

impl<'a> Word<'a> {
    pub fn new(word: &'a AtomicU32, still: u32, scope: Scope) -> Word<'a> {
        Word { word, still, scope }
    }

    fn wait(&self) -> Wait {
        let mut wait = Wait::new();
        wait.val = u64::from(self.still);
        wait.uaddr = WaitPtr::new(self.word.as_ptr().cast());
        wait.flags = match self.scope {
            Scope::Private => WaitFlags::SIZE_U32 | WaitFlags::PRIVATE,
            Scope::Shared => WaitFlags::SIZE_U32,
        };
        wait
    }
}

/// Sleeps until one of at most [`MOST`] words has another value and [`wake`] is called for it. `EAGAIN` if one has
/// another value already. A signal ends it with `EINTR`, unless all handlers that ran were installed with `SA_RESTART`:
/// then the kernel restarts the call.
pub fn sleep_on<'a>(words: impl Iterator<Item = Word<'a>>) -> Result<(), Errno> {
    let mut waits = [const { Wait::new() }; MOST];
    let mut count = 0;
    for (wait, word) in waits.iter_mut().zip(words) {
        *wait = word.wait();
        count += 1;
    }
    // Without a time-out the clock is not read.
    futex::waitv(
        &waits[..count],
        WaitvFlags::empty(),
        None,
        ClockId::Monotonic,
    )?;
    Ok(())
}

/// Wakes a thread that sleeps on `word`, which must have been changed before.
pub fn wake(word: &AtomicU32, scope: Scope) {
    let flags = match scope {
        Scope::Private => Flags::PRIVATE,
        Scope::Shared => Flags::empty(),
    };
    // Fails only for lack of memory.
    let _ = futex::wake(word, flags, 1);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::SeqCst;
    use std::thread;

    use super::*;

    #[test]
    fn any_of_the_words_wakes_and_news_from_before_is_told() {
        let words = [AtomicU32::new(0), AtomicU32::new(7)];
        let still = || {
            [
                Word::new(&words[0], 0, Scope::Private),
                Word::new(&words[1], 7, Scope::Shared),
            ]
            .into_iter()
        };
        thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                while words[1].load(SeqCst) == 7 {
                    let slept = sleep_on(still());
                    assert!(matches!(slept, Ok(()) | Err(Errno::AGAIN)), "{slept:?}");
                }
            });
            words[1].store(8, SeqCst);
            wake(&words[1], Scope::Shared);
            sleeper.join().expect("it wakes");
        });
        assert_eq!(sleep_on(still()), Err(Errno::AGAIN));
    }
}

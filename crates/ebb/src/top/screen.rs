//! The terminal while it shows a picture.

use std::io::{self, Stdout};
use std::sync::Once;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};

use super::frame::{Colours, draw};
use super::model::Model;

/// A terminal in raw mode with the alternate screen. Dropping it restores the terminal.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    colours: Colours,
}

impl Screen {
    /// Takes the terminal over. A panic in any thread gives it back before it is reported.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub(super) fn enter(colours: Colours) -> io::Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                restore();
                before(panic);
            }));
        });
        enable_raw_mode()?;
        let terminal = execute!(io::stdout(), EnterAlternateScreen, Hide)
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        match terminal {
            Ok(terminal) => Ok(Self { terminal, colours }),
            Err(error) => {
                restore();
                Err(error)
            }
        }
    }

    /// Draws a model.
    ///
    /// # Errors
    /// The terminal is gone.
    pub(super) fn draw(&mut self, model: &Model) -> io::Result<()> {
        let colours = self.colours;
        self.terminal.draw(|frame| draw(model, colours, frame.area(), frame.buffer_mut()))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    // Ignored: the terminal is gone.
    let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::process::{Command, Stdio};

    use rustix::fs::{Mode, OFlags};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{LocalModes, tcgetattr};

    use super::*;

    /// Set where this test is to panic, in a process and a terminal of its own.
    const ROLE: &str = "EBB_TEST_PANICS_ON_SCREEN";

    #[test]
    fn a_panic_restores_the_terminal() {
        if std::env::var_os(ROLE).is_some() {
            let _screen = Screen::enter(Colours::No).unwrap();
            // As in the released program, where a panic unwinds nothing.
            let _ = std::thread::spawn(|| panic!("a mistake")).join();
            std::process::abort();
        }
        let outer = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&outer).unwrap();
        unlockpt(&outer).unwrap();
        let name = ptsname(&outer, Vec::new()).unwrap();
        let inner = rustix::fs::open(&name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        let inner = File::from(inner);
        let stream = || Stdio::from(inner.try_clone().unwrap());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "top::screen::tests::a_panic_restores_the_terminal", "--nocapture"])
            .env(ROLE, "1")
            .stdin(stream())
            .stdout(stream())
            .stderr(stream())
            .spawn()
            .unwrap();
        assert!(!child.wait().unwrap().success());
        let modes = tcgetattr(&inner).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO), "{modes:?}");
        let mut seen = vec![0; 4096];
        let length = File::from(outer).read(&mut seen).unwrap();
        let seen = String::from_utf8_lossy(&seen[..length]).into_owned();
        let place = |text: &str| seen.find(text).unwrap_or_else(|| panic!("no {text:?}: {seen:?}"));
        assert!(place("\u{1b}[?1049h") < place("\u{1b}[?1049l"));
        assert!(place("\u{1b}[?25l") < place("\u{1b}[?25h"));
        assert!(place("\u{1b}[?1049l") < place("a mistake"));
    }
}

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

//! What keys do.

use std::path::PathBuf;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::act::Act;
use super::model::{Model, Source};

/// How far Page Up and Page Down go.
const PAGE: usize = 10;
/// Most characters of a filter.
const MOST_FILTER: usize = 64;

/// What the keys are for at the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// For the list.
    List,
    /// For the details of the selected machine, of which so many lines are above the screen.
    Details(u16),
    /// For the help, which any key ends.
    Help,
    /// For the name to filter by.
    Filter,
    /// For the answer to a question.
    Question(Act),
}

/// What the program has to do after a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing but to draw again.
    None,
    /// End.
    End,
    /// Do this.
    Act(Act),
}

/// A movement among the machines.
#[derive(Clone, Copy)]
enum Step {
    Up(usize),
    Down(usize),
}

impl Model {
    /// Takes a key.
    pub(super) fn press(&mut self, key: KeyEvent) -> Effect {
        let is_combined = key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT);
        let code = match key.code {
            KeyCode::Char('c' | 'C') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                return Effect::End;
            }
            // What Backspace sends in some terminals. It must not hold a machine.
            KeyCode::Char('h') if is_combined => KeyCode::Backspace,
            KeyCode::Char(_) if is_combined => return Effect::None,
            code => code,
        };
        self.message = None;
        match self.mode.clone() {
            Mode::Filter => {
                self.type_filter(code);
                Effect::None
            }
            Mode::Question(act) => self.answer_question(act, code),
            Mode::Help => {
                self.mode = Mode::List;
                Effect::None
            }
            Mode::Details(scroll) => match code {
                KeyCode::Esc | KeyCode::Enter => {
                    self.mode = Mode::List;
                    Effect::None
                }
                KeyCode::Up | KeyCode::Char('k') => self.scroll(scroll.saturating_sub(1)),
                KeyCode::Down | KeyCode::Char('j') => self.scroll(scroll.saturating_add(1)),
                code => self.command(code),
            },
            Mode::List => match code {
                KeyCode::Esc => Effect::End,
                code => self.command(code),
            },
        }
    }

    fn command(&mut self, code: KeyCode) -> Effect {
        match code {
            KeyCode::Char('q') => return Effect::End,
            KeyCode::Up | KeyCode::Char('k') => self.go(Step::Up(1)),
            KeyCode::Down | KeyCode::Char('j') => self.go(Step::Down(1)),
            KeyCode::PageUp => self.go(Step::Up(PAGE)),
            KeyCode::PageDown => self.go(Step::Down(PAGE)),
            KeyCode::Home => self.go(Step::Up(usize::MAX)),
            KeyCode::End => self.go(Step::Down(usize::MAX)),
            KeyCode::Enter => self.mode = Mode::Details(0),
            KeyCode::Char('?') => self.mode = Mode::Help,
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Char('s') => {
                self.sort = self.sort.next();
                self.arrange();
            }
            KeyCode::Char('h') => return self.hold(),
            KeyCode::Char('p') => self.ask(Act::Park),
            KeyCode::Char('r') => self.ask(Act::Reclaim),
            _ => {}
        }
        Effect::None
    }

    fn go(&mut self, step: Step) {
        let position = self.position();
        self.select(match step {
            Step::Up(by) => position.saturating_sub(by),
            Step::Down(by) => position.saturating_add(by),
        });
    }

    fn scroll(&mut self, to: u16) -> Effect {
        let lines = self.selected().map_or(0, |row| row.details().lines().count());
        let most = u16::try_from(lines.saturating_sub(1)).unwrap_or(u16::MAX);
        self.mode = Mode::Details(to.min(most));
        Effect::None
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.mode = Mode::List,
            KeyCode::Esc => {
                self.filter.clear();
                self.mode = Mode::List;
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(character)
                if !character.is_control() && self.filter.chars().count() < MOST_FILTER =>
            {
                self.filter.push(character);
            }
            _ => {}
        }
        self.arrange();
    }

    fn hold(&mut self) -> Effect {
        if let Source::Monitors(_) = self.source {
            self.message = Some("there is no daemon that could hold it".to_owned());
            return Effect::None;
        }
        let Some(status) = self.selected().map(|row| &row.status) else { return Effect::None };
        let name = status.name.clone();
        self.start(if status.is_held { Act::Release(name) } else { Act::Hold(name) })
    }

    /// Asks before something is done to the selected machine.
    fn ask(&mut self, act: impl Fn(PathBuf) -> Act) {
        if let Source::Daemon = self.source {
            let message = "the daemon decides that; without one: ebb top --machine SOCKET";
            self.message = Some(message.to_owned());
            return;
        }
        if let Some(row) = self.selected() {
            self.mode = Mode::Question(act(PathBuf::from(&row.status.socket)));
        }
    }

    fn answer_question(&mut self, act: Act, code: KeyCode) -> Effect {
        match code {
            KeyCode::Char('y' | 'Y') => {
                self.mode = Mode::List;
                self.start(act)
            }
            KeyCode::Char('n' | 'N' | 'q') | KeyCode::Esc => {
                self.mode = Mode::List;
                Effect::None
            }
            _ => Effect::None,
        }
    }

    fn start(&mut self, act: Act) -> Effect {
        if self.acts.contains(&act) {
            self.message = Some(format!("{act}: has not ended yet"));
            return Effect::None;
        }
        self.message = Some(format!("{act} ..."));
        self.acts.push(act.clone());
        Effect::Act(act)
    }
}
